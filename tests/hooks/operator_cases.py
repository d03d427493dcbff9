"""PyTorch's own database of operators and sample inputs, as programs that run plainly and under a store.

A *run* is a generator that computes one sample and stops between its passes (forward, backward, backward again), so
that many runs go side by side: what all of them saved is on disk before any of them goes on. Between passes a run
holds edges of its graph, not tensors: what was saved, outputs included, has no other owner than the store.
"""

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from tests.existing import set_existing
from tests.hooks.programs import Around, bits, forget_after_error
from tierstore import TierStore, tiered_offload

DTYPES = (torch.float32, torch.complex64)

Entry = Any
"""An `OpInfo`, and one of its `SampleInput`s: torch has no types for them."""
Sample = Any
Outcome = list[object] | str
"""The bits of everything that a run computed, or the error that it ended with."""
Run = Generator[None, None, list[object]]


def differentiable_entries() -> dict[str, Entry]:
    """The entries of `op_db` that support autograd, by full name (`linalg.svd`, `norm.nuc`)."""
    with warnings.catch_warnings():  # of packages that torch's tests import, such as numba
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core

    # The import forbids the whole process to set flags of `torch.backends` but by their context managers.
    set_existing(torch.backends, __allow_nonbracketed_mutation_flag=True)
    # For each sample they look for a `unittest.TestCase` on the stack. None is there, and that took most of the time.
    for module in (common_utils, core):
        set_existing(module, extract_test_fn=lambda: None)
    entries = [entry for entry in op_db if entry.supports_autograd]
    found = {entry.full_name: entry for entry in entries}
    assert len(found) == len(entries), "two entries have the same name"
    return found


def dtypes_of(entry: Entry, device: str) -> list[torch.dtype]:
    """Those of DTYPES in which the entry has a backward on that device."""
    kind = torch.device(device).type
    supported = entry.supported_dtypes(kind) & entry.supported_backward_dtypes(kind)
    return [dtype for dtype in DTYPES if dtype in supported]


def seed(number: int) -> None:
    """As `torch.manual_seed`, which for each accelerator that is not there keeps the call and its stack for later."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


@dataclass(frozen=True)
class Case:
    """One sample of one entry, or of its variant that works in place."""

    function: Callable[..., Any]
    sample: Sample
    number: int

    def forward(
        self, around: Around
    ) -> tuple[list[object], list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]:
        """The bits of the outputs; their edges, with a gradient for each; the leaves."""
        leaves: list[torch.Tensor] = []
        seed(self.number)
        with around():
            outputs = self._outputs(leaves)
        found = [value_of(output) for output in outputs]
        outputs = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
        return found, [get_gradient_edge(output) for output in outputs], [_direction(out) for out in outputs], leaves

    def _outputs(self, leaves: list[torch.Tensor]) -> list[Any]:
        """Of the operator on copies of the sample's tensors; a copy of one that requires grad is not a leaf."""
        copies: dict[int, torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in copies:
                copies[id(value)] = _non_leaf(value, leaves) if value.requires_grad else _copy(value)
            return copies[id(value)]

        sample = self.sample
        value, args, kwargs = tree_map(copied, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        return tree_leaves(sample.output_process_fn_grad(self.function(value, *args, **kwargs)))


def backward(case: Case, around: Around, num_passes: int = 1) -> Run:
    """Forward; the gradients of all leaves, by one pass through the graph or several."""
    found, edges, directions, leaves = case.forward(around)
    for number in range(num_passes):
        yield
        seed(case.number)
        found += _values(_gradients(edges, directions, leaves, retain_graph=number < num_passes - 1))
    return found


def double_backward(case: Case, around: Around) -> Run:
    """Forward; backward, which saves tensors itself; backward through both."""
    found, edges, directions, leaves = case.forward(around)
    num_inputs = len(leaves)
    yield
    seed(case.number)
    with around():
        gradients = _gradients(
            edges, [_non_leaf(direction, leaves) for direction in directions], leaves[:num_inputs], create_graph=True
        )
    found += _values(gradients)
    gradients = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    edges, second = [get_gradient_edge(gradient) for gradient in gradients], [_direction(one) for one in gradients]
    del gradients
    yield
    return found + _values(_gradients(edges, second, leaves))


def _gradients(
    edges: Sequence[GradientEdge], directions: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], **options: bool
) -> Sequence[torch.Tensor | None]:
    if not edges or not leaves:
        return []
    return torch.autograd.grad(edges, leaves, directions, allow_unused=True, **options)


class _Copied(torch.autograd.Function):
    """A copy with the same geometry, and storage of its own: `clone()` would make it dense."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _copy(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        return tensor.detach().clone()
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    torch._C._set_conj(copy, tensor.is_conj())
    torch._C._set_neg(copy, tensor.is_neg())
    return copy


def _non_leaf(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    """A copy of a new leaf. Leaves are kept where they are; a copy, once nobody holds it, is not."""
    leaf = tensor.detach().requires_grad_()
    leaves.append(leaf)
    return _Copied.apply(leaf) if tensor.layout is torch.strided else leaf.clone()


def _direction(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output, the same in every run."""
    if output.layout is not torch.strided:
        return output.detach().clone()
    numbers = torch.arange(1, output.numel() + 1, dtype=torch.float64, device=output.device)
    numbers = (numbers * math.e).sin()
    if output.is_complex():
        numbers = torch.complex(numbers, numbers.cos())
    return numbers.to(output.dtype).reshape(output.shape)


def _values(tensors: Iterable[torch.Tensor | None]) -> list[object]:
    return [value_of(tensor) for tensor in tensors]


def value_of(value: Any) -> object:
    """The bits of a tensor of any layout; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.layout is torch.strided:
        return bits(value.cpu())
    if value.layout is torch.sparse_coo:
        parts = [value._indices(), value._values()]
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    else:
        parts = [value.ccol_indices(), value.row_indices(), value.values()]
    return [value.layout, tuple(value.shape), *map(value_of, parts)]


def outcomes(
    make: Callable[[Case, Around], Run], cases: Sequence[Case], around: Around, settle: Callable[[], None]
) -> list[Outcome]:
    """What each case comes to, with `settle` called between the passes of all of them."""
    runs: dict[int, Run] = {number: make(case, around) for number, case in enumerate(cases)}
    found: dict[int, Outcome] = {}
    while runs:
        for number, run in list(runs.items()):
            try:
                with _torch_may_warn():
                    next(run)
            except StopIteration as end:
                found[number] = end.value
                del runs[number]
            except Exception as error:  # noqa: BLE001 - whatever it is, the other run has to raise the same
                found[number] = f"{type(error).__name__}: {error}"
                del runs[number]
                forget_after_error()
        settle()
    return [found[number] for number in range(len(cases))]


def plain_outcomes(make: Callable[[Case, Around], Run], cases: Sequence[Case]) -> list[Outcome]:
    return outcomes(make, cases, nullcontext, lambda: None)


def _copying_hooks() -> AbstractContextManager[object]:
    """The plainest of hooks, which hand back a copy of what was saved: what any store has to differ in."""
    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)


def cases_of(
    entry: Entry, device: str, dtype: torch.dtype, most: int | None = None, *, in_place: bool = False
) -> list[Case]:
    """`in_place`: of the variant that changes its input; none for samples whose result has another shape than that."""
    function = entry.get_inplace() if in_place else entry.op
    if function is None or (in_place and not entry.supports_inplace_autograd):
        return []
    seed(0)
    with _torch_may_warn():
        samples = list(islice(entry.sample_inputs(device, dtype, requires_grad=True), most))
    if in_place:
        samples = [sample for sample in samples if not sample.broadcasts_input]
    return [Case(function, sample, number) for number, sample in enumerate(samples)]


def _torch_may_warn() -> warnings.catch_warnings:
    """The samples call what is deprecated, and what is in beta, on purpose."""
    return warnings.catch_warnings(action="ignore")


KINDS: dict[str, Callable[[Case, Around], Run]] = {
    "forward and backward": backward,
    "backward twice": partial(backward, num_passes=2),
    "double backward": double_backward,
    "in place": backward,
}
"""What is done with the samples of an entry."""


def cases_by_kind(entry: Entry, device: str, dtype: torch.dtype, most: int | None = None) -> dict[str, list[Case]]:
    """`most` samples (None: all) forward and backward, and in place where there is such a variant; one for the rest."""
    cases = cases_of(entry, device, dtype, most)
    return {
        "forward and backward": cases,
        "backward twice": cases[:1],
        "double backward": cases[:1] if entry.supports_gradgrad else [],
        "in place": cases_of(entry, device, dtype, most, in_place=True),
    }


class Verdict(NamedTuple):
    """How the runs of one kind compare.

    Attributes:
        num_same: same bits.
        refused: the same errors, and what they say.
        differences: of the other cases, with what plain PyTorch and the plainest hooks do with them.
        num_unsteady: cases whose plain runs differ among themselves, or from those with hooks that only copy.
    """

    num_same: int
    refused: list[str]
    differences: list[str]
    num_unsteady: int


def compare(kind: str, cases: Sequence[Case], store: TierStore) -> Verdict:
    make = KINDS[kind]
    expected = plain_outcomes(make, cases)
    found = outcomes(make, cases, lambda: tiered_offload(store, min_bytes=0), store.flush)
    refused = [one for one, other in zip(expected, found, strict=True) if one == other and isinstance(one, str)]
    wrong = [number for number, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other]
    differences, num_unsteady = [], 0
    for number in wrong:
        again = [plain_outcomes(make, cases[number : number + 1])[0] for _ in range(4)]
        copying = outcomes(make, cases[number : number + 1], _copying_hooks, lambda: None)[0]
        unsteady = any(one != expected[number] for one in again)
        num_unsteady += unsteady or copying != expected[number]
        differences.append(
            f"sample {number}: {_where(expected[number], found[number])}; "
            f"plain runs {'differ' if unsteady else 'agree'}, "
            f"hooks that copy {'agree' if copying == expected[number] else 'differ'}"
        )
    return Verdict(len(cases) - len(refused) - len(wrong), refused, differences, num_unsteady)


def _where(expected: Outcome, found: Outcome) -> str:
    if isinstance(expected, str) or isinstance(found, str):
        return " against ".join(one if isinstance(one, str) else "no error" for one in (found, expected))
    return f"values {[number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]}"
