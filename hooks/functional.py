"""`torch.func` beside offloading: it refuses to run under saved-tensor hooks, and its error then says what to do."""

from __future__ import annotations

__all__ = ["ADVICE_WITHIN", "advise"]

_REFUSAL = "don't yet support saved tensor hooks"  # said by torch._functorch.vmap
_ADVICE = (
    "torch.func.grad, vjp, jacrev and hessian cannot run under saved-tensor hooks: call them outside tiered_offload, "
    "or inside tierstore.keep_resident(hooks=False)"
)
ADVICE_WITHIN = (
    "torch.func.grad, vjp, jacrev and hessian cannot run under saved-tensor hooks: the function that they "
    "differentiate cannot enter tiered_offload. Give them the function without it, and an offloaded module after "
    "remove_offload"
)
"""For an error that is raised as a scope is entered inside of `torch.func`."""


def advise(error: BaseException, advice: str = _ADVICE) -> None:
    """If `torch.func` has refused to run because of our hooks, add to its error, once, what can be done."""
    if isinstance(error, RuntimeError) and _REFUSAL in str(error):
        notes = getattr(error, "__notes__", ())
        if _ADVICE not in notes and ADVICE_WITHIN not in notes:
            error.add_note(advice)
