"""Programs that are run twice, plainly and under a store, and the bits of what they compute."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses
from torch.utils._python_dispatch import TorchDispatchMode

from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, TierStore, tiered_offload

Bits = tuple[torch.dtype, tuple[int, ...], bytes] | None
Around = Callable[[], AbstractContextManager[object]]
Settle = Callable[[], None]
Results = list[torch.Tensor | None]
Program = Callable[[Around, Settle], Iterable[torch.Tensor | None]]
"""Called with what makes the scope around forward, and what to call between forward and backward."""

SIDE = 64
"""Of the square matrices: one of float32 takes 16 KiB."""
LARGE_SIDE = 640
"""Of square matrices that leave one by one: one of float32 takes more than 1.5 MiB, the most that a group takes in."""


def bits(tensor: torch.Tensor | None) -> Bits:
    """Dtype, shape and bytes: equal only if every bit is, NaNs included."""
    if tensor is None:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    # A clone, because `numpy()` marks a storage for good; `contiguous()` leaves the odd stride of a single element.
    copy = plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).cpu()
    return tensor.dtype, tuple(tensor.shape), copy.numpy().tobytes()


def all_bits(tensors: Iterable[torch.Tensor | None]) -> list[Bits]:
    return [bits(tensor) for tensor in tensors]


def run_plain(program: Program) -> list[Bits]:
    torch.manual_seed(0)
    return all_bits(program(nullcontext, lambda: None))


def run_offloaded(program: Program, store: TierStore, **options: object) -> list[Bits]:
    """Under `tiered_offload`, with everything that has to go to disk there before backward begins."""
    torch.manual_seed(0)
    settings: dict[str, object] = {"min_bytes": 0} | options
    return all_bits(program(lambda: tiered_offload(store, **settings), store.flush))  # type: ignore[arg-type]


def assert_same_bits(found: Sequence[Bits], expected: Sequence[Bits]) -> None:
    assert len(found) == len(expected)
    wrong = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert not wrong, f"results {wrong} of {len(expected)} differ"


def assert_same_gradients(program: Program, store: TierStore, **options: object) -> None:
    """Plain and offloaded bits are the same, and the store was not idle."""
    before = store.stats().packed_tensors
    assert_same_bits(run_offloaded(program, store, **options), run_plain(program))
    assert store.stats().packed_tensors > before


def program_of(loss: Callable[..., torch.Tensor], *shapes: Sequence[int], num_backwards: int = 1) -> Program:
    """The gradients of a function of random leaves. What else it makes on the way has died before backward."""

    def program(around: Around, settle: Settle) -> Results:
        leaves = [torch.randn(shape, requires_grad=True) for shape in shapes or [(SIDE, SIDE)]]
        results: Results = []
        with around():
            total = loss(*leaves)
        for _ in range(num_backwards):
            settle()
            total.backward(retain_graph=num_backwards > 1)
            results += [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        return results

    return program


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


class DispatchMode(TorchDispatchMode):
    """Calls `ask` with each operator, before that runs."""

    def __init__(self, ask: Callable[[Any], object]) -> None:
        super().__init__()
        self._ask = ask

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ask(function)
        return function(*args, **(kwargs or {}))


def _in_grad(ask: Callable[[], object]) -> None:
    def function(values: torch.Tensor) -> torch.Tensor:
        ask()
        return values.sum()

    torch.func.grad(function)(torch.ones(3))


def _in_vmap(ask: Callable[[], object]) -> None:
    def function(values: torch.Tensor) -> torch.Tensor:
        ask()
        return values.sum()

    torch.vmap(function)(torch.ones(2, 3))


def _in_fake_mode(ask: Callable[[], object]) -> None:
    """As who wants to know the shapes of what a function computes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        ask()


def _below_autograd(ask: Callable[[], object]) -> None:
    """As a mode that watches memory, or a profiler's."""

    asks = [ask]
    with DispatchMode(lambda _: asks and asks.pop()()):
        torch.ones(3).neg()


_asked: list[Callable[[], object]] = []


@torch.library.custom_op("tierstore_tests::asks", mutates_args=())
def _asks(values: torch.Tensor) -> torch.Tensor:
    _asked[-1]()
    return values.clone()


def _in_custom_operator(ask: Callable[[], object]) -> None:
    _asked.append(ask)
    try:
        _asks(torch.ones(3))
    finally:
        _asked.pop()


def _in_function_of_vmap(ask: Callable[[], object]) -> None:
    """Below autograd and inside a transform, both at once."""
    torch.vmap(lambda values: (_below_autograd(ask), values.sum())[1])(torch.ones(2, 3))


IN_MODES: dict[str, Callable[[Callable[[], object]], None]] = {
    "fake": _in_fake_mode,
    "grad": _in_grad,
    "vmap": _in_vmap,
    "inference": lambda ask: torch.inference_mode()(ask)(),
    "below autograd": _below_autograd,
    "below autograd in vmap": _in_function_of_vmap,
    "below autograd in inference mode": lambda ask: torch.inference_mode()(_below_autograd)(ask),
    "custom operator": _in_custom_operator,
}
"""Call a function where modes of torch would see what it does, or would change what a detached tensor shares."""


def in_threads(*functions: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Where tensors are small: more threads would only wait for each other, most of all on busy cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def forget_after_error() -> None:
    """After an error in backward, autograd's queue on this thread keeps what it had not come to, until the next one."""
    torch.zeros((), requires_grad=True).backward()


def sine_chain(leaf: torch.Tensor, num: int) -> torch.Tensor:
    """Saves a tensor of its own in each of `num` operations, the leaf among them."""
    value = leaf
    for _ in range(num):
        value = value.sin()
    return value.sum()


def gradient_of(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """May be asked for again."""
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def assert_a_change_in_place_is_found(leaf: torch.Tensor, number: int, store: TierStore) -> None:
    """Of so many tensors that leave together, as one of the tensor that was changed."""
    with tiered_offload(store, min_bytes=0):
        values = [leaf * each for each in range(number)]
        losses = [value.sin().sum() for value in values]
        changed = values[3]
        values.clear()
        changed.add_(1)
        del changed
    assert max(record.num_members for record in inspect(store).records) > 1
    for each, loss in enumerate(losses):
        if each == 3:
            with pytest.raises(ModifiedInPlaceError):
                gradient_of(loss, leaf)
        else:
            assert torch.equal(gradient_of(loss, leaf), gradient_of((leaf * each).sin().sum(), leaf))
    forget_after_error()


def half_leaf(num_numbers: int = 2**10) -> torch.Tensor:
    return torch.full((num_numbers,), 0.5, requires_grad=True)


class Mlp(nn.Module):
    def __init__(self, width: int = SIDE) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width), nn.Tanh()
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()


class ConvNet(nn.Module):
    """Batch norm, its running statistics, dropout, and the indices of max-pooling (int64)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), self.norm, nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3, padding=1), self.norm, nn.LeakyReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(),
            nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(batch)) % 10
        return F.cross_entropy(self.layers(batch), labels)


class Transformer(nn.Module):
    """One block whose softmax attention is written out, with q, k and v as parts of one product."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        rows, length, width = batch.shape
        shape = (rows, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norms[0](batch)).chunk(3, -1))
        scores = F.dropout((query @ key.transpose(-1, -2)).softmax(-1), 0.1)
        batch = batch + self.out((scores @ value).transpose(1, 2).reshape(rows, length, width))
        return (batch + self.mlp(self.norms[1](batch))).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output, (hidden, cell) = self.lstm(batch)
        return output.square().mean() + (hidden * cell).sum()


class Branches(nn.Module):
    """Branches of different depth that meet again; backward interleaves them."""

    def __init__(self, width: int = SIDE) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(width, width) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        stem = self.stem(batch).sigmoid()
        left = self.left(stem).relu() * stem
        right = stem
        for _ in range(3):
            right = self.right(right).exp().log1p()
        mixed = torch.cat([left, right, stem.sin()], 1)
        return (mixed[:, ::2].softmax(1) * mixed[:, 1::2]).sum() + left.logsumexp(1).mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (SIDE, SIDE)),
    "convnet": (ConvNet, (6, 3, 16, 16)),
    "transformer": (Transformer, (3, 16, 32)),
    "lstm": (Recurrent, (4, 12, 16)),
    "branches": (Branches, (SIDE, SIDE)),
}


def training_of(
    make: Callable[[], nn.Module],
    make_batch: Callable[[], Sequence[torch.Tensor]],
    num_steps: int = 3,
    optimizer: str = "SGD",
    lr: float = 0.05,
) -> Program:
    """Some steps of training a model, which gives its loss; all losses and gradients, and the final state."""

    def program(around: Around, settle: Settle) -> Results:
        model = make()
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=lr)
        results: Results = []
        for _ in range(num_steps):
            batch = make_batch()
            with around():
                loss = model(*batch)
            settle()
            loss.backward()
            results += [loss.detach(), *(grad if grad is None else grad.clone() for grad in grads(model))]
            steps.step()
            steps.zero_grad()
        return results + list(model.state_dict().values())

    return program


def training(name: str, num_steps: int = 3, optimizer: str = "SGD") -> Program:
    """Of the model of that name."""
    make, shape = MODELS[name]
    return training_of(make, lambda: [torch.randn(shape)], num_steps, optimizer)
