"""`torch.func` beside offloading: it refuses to run under saved-tensor hooks; its error then says what to do."""

from __future__ import annotations

__all__ = ["ADVICE_WITHIN", "advise"]

_REFUSAL = "don't yet support saved tensor hooks"  # of torch.func, by torch._functorch.vmap
_ADVICE = (
    "torch.func.grad, vjp, jacrev and hessian run under no saved-tensor hooks: call them outside of tiered_offload, "
    "or inside tierstore.keep_resident(hooks=False)"
)
ADVICE_WITHIN = (
    "torch.func.grad, vjp, jacrev and hessian run under no saved-tensor hooks: what they differentiate cannot enter "
    "tiered_offload; give them the function without it, and of a module of offload_module its attribute module"
)


def advise(error: BaseException, advice: str = _ADVICE) -> None:
    """Where `torch.func` refuses to run because of our hooks, its error says, once, what can be done."""
    if isinstance(error, RuntimeError) and _REFUSAL in str(error):
        notes = getattr(error, "__notes__", ())
        if _ADVICE not in notes and ADVICE_WITHIN not in notes:
            error.add_note(advice)
