"""Programs over graphs, as lists of steps, and the account of what each step gave: for `test_random_graphs.py`.

`CopyAtPack` is the simplest store there can be, to compare with.
"""

import gc
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses
from torch.utils.checkpoint import checkpoint

from tests.hooks.programs import Bits, all_bits, bits, forget_after_error

__all__ = ["BACKWARDS", "EDITS", "NO_ROOM", "OPERATIONS", "THIEVES", "VIEWS", "CopyAtPack", "Machine", "Step"]

SHAPES = [(2, 2), (6, 8), (16, 16), (64, 64), (128, 128)]
"""Of 16 bytes, 192, 1 KiB, 16 KiB, 64 KiB."""

VALUES = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in SHAPES]
NO_ROOM = "no room on the device"


class _Thief(torch.autograd.Function):
    """Gives some of what it saved as its gradients, those of the given numbers: autograd may keep one, and add to it.

    What it saves requires no gradient: otherwise hooks that do nothing may already differ from no hooks, since autograd
    gives a function that saved a leaf the leaf itself, and adds to no leaf, but with hooks gives it a new tensor.
    """

    @staticmethod
    def forward(context: Any, numbers: Sequence[int], saved: Sequence[Tensor], *tensors: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(*saved)
        context.numbers = numbers
        return torch.stack(tensors).sum(0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = context.saved_tensors
        return None, None, *[saved[number] for number in context.numbers]


def _two_thieves(left: Tensor, right: Tensor) -> Tensor:
    saved = [left.detach() + 0]
    return _Thief.apply([0], saved, left) - _Thief.apply([0], saved, right)


def _thief_twice(left: Tensor, right: Tensor) -> Tensor:
    saved = left.detach() + 0
    return _Thief.apply([0, 2], [saved, right.detach() + 0, saved], left, right)


def _thief_of_views(left: Tensor, right: Tensor) -> Tensor:
    return _Thief.apply([1, 0], (left.detach() + right.detach()).repeat(2, 1).chunk(2), left, right)


def _gated(left: Tensor, right: Tensor) -> Tensor:
    gate, up = torch.cat([left, right], 1).chunk(2, 1)
    return gate.sigmoid() * up


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda left, right: left * right,
    "quotient": lambda left, right: left / (right.square() + 1),
    "sum": lambda left, right: left + right,
    "sine": lambda left, right: left.sin(),
    "tanh": lambda left, right: left.tanh(),
    "exp": lambda left, right: (left * 0.1).exp(),
    "relu": lambda left, right: left.relu(),
    "softmax": lambda left, right: left.softmax(-1),
    "matmul": lambda left, right: (left @ right.t() @ left).tanh(),
    "where": lambda left, right: torch.where(left > right, left, right * 2),
    "max": lambda left, right: left + left.max(-1, keepdim=True).values,
    "gather": lambda left, right: left.gather(1, right.argsort(1)),
    "clone": lambda left, right: left.clone(),
    "detach": lambda left, right: left.detach(),
    "half": lambda left, right: (left.bfloat16() * right.bfloat16()).float(),
    "complex": lambda left, right: (torch.complex(left, right).conj() * torch.complex(right, left)).imag,
    "dropout": lambda left, right: F.dropout(left, 0.3),
    "rrelu": lambda left, right: F.rrelu(left, training=True),  # saves its noise before the kernel fills it
    "thief": lambda left, right: _Thief.apply([0], [left.detach() + 0], left),
    "thief of views": _thief_of_views,
    "thief twice": _thief_twice,
    "two thieves": _two_thieves,
    "gated": _gated,
    "checkpoint": lambda *given: checkpoint(_gated, *given, use_reentrant=False, preserve_rng_state=False),
}
"""From two tensors of one shape to one of that shape."""

THIEVES = [name for name in OPERATIONS if "thie" in name]

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda tensor: tensor,
    "first rows": lambda tensor: tensor[: len(tensor) // 2],
    "last rows": lambda tensor: tensor[len(tensor) // 2 :],
    "column": lambda tensor: tensor[:, 1],
    "stepped": lambda tensor: tensor[:, ::2],
    "transposed": lambda tensor: tensor.t(),
    "flat": lambda tensor: tensor.view(-1)[1:-1] if tensor.is_contiguous() else tensor[1],
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "chunk": lambda tensor: tensor.chunk(2, 1)[1],
    "unsafe chunk": lambda tensor: tensor.unsafe_chunk(2, 1)[0],
    "expanded": lambda tensor: tensor[:1].expand(2, -1),
}

BACKWARDS = ["gradients", "part", "accumulate", "graph", "elsewhere", "twice"]
"""Ways to use a graph: methods of `Machine`."""

EDITS: dict[str, Callable[[Tensor], object]] = {
    "add": lambda tensor: tensor.add_(0.5),
    "mul": lambda tensor: tensor.mul_(2),
    "relu": lambda tensor: tensor.relu_(),
    "tanh": lambda tensor: tensor.tanh_(),
    "zero": lambda tensor: tensor.zero_(),
}


class Step(NamedTuple):
    """One step. `kind` is the name of a method of `Machine`; the others are its arguments, where it has any."""

    kind: str
    name: str = ""
    view: str = "whole"
    left: int = 0
    right: int = 0
    flag: bool = False

    @property
    def needs_shared_memory(self) -> bool:
        """Whether PyTorch lets a change be seen, that no version counter tells of, or hands out what was saved."""
        return self.name in ("rrelu", *THIEVES) or self.view in ("data", "unsafe chunk")


class _EndedError(Exception):
    """The device is full."""


class Machine:
    """Runs steps over live tensors, and over graphs by their roots.

    Args:
        scope: makes what saves; at most one is entered at a time.
        settle: has all leave that can leave now.
    """

    def __init__(self, scope: Callable[[], AbstractContextManager[object]], settle: Callable[[], object]) -> None:
        torch.default_generator.manual_seed(7)  # `torch.manual_seed` looks for every accelerator, each time
        self.leaves = [value.clone().requires_grad_() for value in (*VALUES, VALUES[2], VALUES[2])]  # some of one shape
        self.live = [*self.leaves, VALUES[2].clone(), VALUES[4].clone()]
        self.num_fixed = len(self.live)
        self.terms: list[Tensor] = []
        self.roots: list[Tensor] = []
        self.held: list[Tensor | None] = []  # what it was given, to be looked at again
        self.has_hidden = False
        self._settle = settle
        self._scope, self._entered = scope, ExitStack()

    def account(self, program: Sequence[Step]) -> tuple[list[object], list[Bits]]:
        """What happened at each step, and what is in the end in that which it was given on the way."""
        seen: list[object] = []
        ending = [Step("root", right=5), Step("clear"), Step("leave"), *[Step("backward", "accumulate")] * 4]
        ending += [Step("use_gradient", right=number, flag=True) for number in range(len(self.leaves))]
        try:
            self.enter()
            for step in (*program, *ending):
                seen.append(self._attempt(step))  # noqa: PERF401 - what was seen is kept when it ends early
        except _EndedError:
            seen.append(NO_ROOM)
        finally:
            self.leave()
        forget_after_error()
        return seen, all_bits([*self.held, *(leaf.grad for leaf in self.leaves)])

    def _attempt(self, step: Step) -> object:
        return _attempt(lambda: getattr(self, step.kind)(step))

    def _one(self, number: int) -> Tensor:
        return self.live[-1 - number % len(self.live)]

    # --- forward

    def operation(self, step: Step) -> None:
        left = self._one(step.left)
        self.live.append(OPERATIONS[step.name](left, _fitted(self._one(step.right), left)))

    def steal(self, step: Step) -> None:
        """Gradients of leaves, which keep what they are given."""
        of_one_shape = [leaf for leaf in self.leaves if leaf.shape == SHAPES[2]]
        left, right = (of_one_shape[number % len(of_one_shape)] for number in (step.left, step.right))
        self.live.append(OPERATIONS[step.name](left, right))

    def chain(self, step: Step) -> None:
        """Many small nodes, one after the other: each saves one tensor."""
        value = self._one(step.left)
        for _ in range(1 + step.right % 32):
            value = value.sin() if step.flag else value.sigmoid()
        self.live.append(value)

    def meet(self, step: Step) -> None:
        """A branch that is as long as the chain, and meets it again."""
        stem = self._one(step.left)
        branch = stem
        for number in range(1 + step.right % 5):
            branch = (branch * stem if number % 2 else branch.t().exp().t().clamp(max=2)).tanh()
        self.live.append(branch + stem.square())

    def read(self, step: Step) -> None:
        self.terms.append(getattr(VIEWS[step.view](self._one(step.left)), step.name)().sum())

    def edit(self, step: Step) -> None:
        tensor = self._one(step.left)
        with torch.no_grad() if step.flag or tensor.is_leaf else nullcontext():
            EDITS[step.name](VIEWS[step.view](tensor))

    # --- what is dropped

    def forget(self, step: Step) -> None:
        if len(self.live) > self.num_fixed:
            del self.live[self.num_fixed + step.left % (len(self.live) - self.num_fixed)]

    def hide(self, step: Step) -> None:
        """Only garbage collection finds it now."""
        if len(self.live) > self.num_fixed:
            cycle: list[object] = [self.live.pop()]
            cycle.append(cycle)
            self.has_hidden = True

    def collect(self, step: Step) -> None:
        if self.has_hidden:
            gc.collect()
        self.has_hidden = False

    def clear(self, step: Step) -> None:
        del self.live[self.num_fixed :]
        self.terms.clear()

    def drop(self, step: Step) -> None:
        """A graph dies without a backward, but for what others share with it."""
        if self.roots:
            del self.roots[step.left % len(self.roots)]

    # --- the store

    def enter(self, step: Step | None = None) -> None:
        self.leave()
        self._entered.enter_context(self._scope())

    def leave(self, step: Step | None = None) -> None:
        self._entered.close()

    def settle(self, step: Step) -> None:
        self._settle()

    # --- backward

    def root(self, step: Step) -> list[Bits]:
        """A graph of its own, with parts that it shares with others."""
        newest = self.live[-1 - step.right % 6 :]
        self.roots.append(torch.stack([*self.terms, *(tensor.sum() for tensor in newest)]).sum())
        if step.flag:
            self.clear(step)
        return [bits(self.roots[-1])]

    def backward(self, step: Step) -> object:
        if not self.roots:
            return None
        root = self.roots[step.left % len(self.roots)]
        if not step.flag:
            self.roots = [other for other in self.roots if other is not root]
        return getattr(self, "_" + step.name)(root, step)

    def _gradients(self, root: Tensor, step: Step, leaves: Sequence[Tensor] | None = None) -> list[Bits]:
        found = torch.autograd.grad(root, leaves or self.leaves, retain_graph=step.flag, allow_unused=True)
        self.held += found
        return all_bits(found)

    def _part(self, root: Tensor, step: Step) -> list[Bits]:
        return self._gradients(root, step, [self.leaves[step.right % len(self.leaves)]])

    def _accumulate(self, root: Tensor, step: Step) -> list[Bits]:
        root.backward(retain_graph=step.flag)
        return all_bits(leaf.grad for leaf in self.leaves)

    def _graph(self, root: Tensor, step: Step) -> list[Bits]:
        """Gradients that have a graph themselves, and are computed with like all else."""
        found = torch.autograd.grad(root, self.leaves, create_graph=True, allow_unused=True)
        self.live += [gradient for gradient in found if gradient is not None]
        return all_bits(found)

    def _elsewhere(self, root: Tensor, step: Step) -> object:
        return _on_threads([lambda: self._accumulate(root, step)])

    def _twice(self, root: Tensor, step: Step) -> object:
        return _on_threads([lambda: self._gradients(root, step._replace(flag=True)) for _ in range(2)])

    def look(self, step: Step) -> list[Bits]:
        """The user looks at what a node has saved, and keeps it."""
        node: Any = self._one(step.left).grad_fn
        names = [name for name in dir(node) if name.startswith("_saved_")]
        found = [each for each in (getattr(node, name) for name in names) if isinstance(each, Tensor)]
        self.held += [each.detach() for each in found]
        return all_bits(found)

    def use_gradient(self, step: Step) -> None:
        """What an optimizer does with it, or a loop that clears it."""
        leaf = self.leaves[step.right % len(self.leaves)]
        if leaf.grad is not None:
            self.held.append(leaf.grad.clone())
            leaf.grad.mul_(0.5) if step.flag else leaf.grad.zero_()


def _fitted(tensor: Tensor, other: Tensor) -> Tensor:
    """A view of the tensor in the other's shape: a part of it, or an element again and again."""
    rows, columns = other.shape
    if tensor.shape[0] >= rows and tensor.shape[1] >= columns:
        return tensor[:rows, :columns]
    return tensor[:1, :1].expand(rows, columns)


def _attempt(action: Callable[[], object]) -> object:
    """What it returns; or what PyTorch or the store refuses, and why."""
    try:
        return action()
    except torch.OutOfMemoryError:
        raise _EndedError from None
    except RuntimeError as error:
        # Of a view that was edited, plain autograd may name the view first and the version second: both refuse.
        refusal = "modified inplace" if re.search("modified (by an )?inplace", str(error)) else str(error)
        return "refused: " + refusal


def _on_threads(actions: Sequence[Callable[[], object]]) -> object:
    found: list[object] = [None] * len(actions)

    def run(number: int) -> None:
        try:
            found[number] = _attempt(actions[number])
        except _EndedError:
            found[number] = NO_ROOM
        forget_after_error()  # or the thread's own queue lets go only after `join`

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if NO_ROOM in found:
        raise _EndedError
    return found


class CopyAtPack(torch.autograd.graph.saved_tensors_hooks):
    """A copy of the storage at pack, another one at each unpack, and autograd's check of the version."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)

    @staticmethod
    def _pack(tensor: Tensor) -> tuple[Tensor, Tensor, int]:
        return _copy(tensor), tensor.detach(), tensor._version

    @staticmethod
    def _unpack(packed: tuple[Tensor, Tensor, int]) -> Tensor:
        copy, counter, version = packed
        if counter._version != version:
            raise RuntimeError("modified by an inplace operation")
        return _copy(copy)


def _copy(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    whole = torch.empty(0, dtype=tensor.dtype).set_(plain.untyped_storage().clone(), 0, (0,))
    copy = whole.as_strided(plain.shape, plain.stride(), plain.storage_offset())
    return torch._neg_view(copy) if plain.is_neg() else copy.conj() if plain.is_conj() else copy
