"""What backward gets is what hooks that do nothing would give it: the object itself, its class, its attributes."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, bits
from tierstore import ModifiedInPlaceError, TierStore, keep_resident, tiered_offload

Make = Callable[[], torch.Tensor]
Scope = Callable[[TierStore], AbstractContextManager[object]]


class Sub(torch.Tensor):
    """A subclass whose functions return it."""


class Silent(torch.Tensor):
    """One whose functions return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Shedding(torch.Tensor):
    """One whose `detach` gives a plain tensor."""

    def detach(self) -> torch.Tensor:
        return torch.Tensor.detach(self).as_subclass(torch.Tensor)


class Hostile(torch.Tensor):
    """One that allows nobody to ask it anything."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("a hook asked")


class Index(torch.Tensor):
    """Like the `EdgeIndex` of torch_geometric: wraps a tensor; nothing but what it knows of is of its class again."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    data_: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, requires_grad=requires_grad
        )
        made.data_ = data
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = torch.utils._pytree.tree_map_only(Index, lambda index: index.data_, (args, kwargs or {}))
        return cls.rebuilt(function, function(*found[0], **found[1]), args[0])

    @classmethod
    def rebuilt(cls, function: Any, result: Any, first: Any) -> Any:
        return result


class Rebuilding(Index):
    """One whose results are of its class, and whose `detach` hands its attribute on."""

    @classmethod
    def rebuilt(cls, function: Any, result: Any, first: Any) -> Any:
        if not isinstance(result, torch.Tensor) or isinstance(result, Index):
            return result
        made = cls(result)
        if function is torch.ops.aten.detach.default and "scale" in first.__dict__:
            made.scale = first.scale
        return made


def _values() -> torch.Tensor:
    return torch.arange(float(SIDE * SIDE))


CLASSES: dict[str, Make] = {
    "plain": _values,
    "frozen parameter": lambda: torch.nn.Parameter(_values(), requires_grad=False),
    "view": lambda: _values()[:],
    "part": lambda: torch.cat([_values(), _values()])[SIDE * SIDE :],
    "plain view of a subclass": lambda: torch.Tensor._make_subclass(Sub, _values()).as_subclass(torch.Tensor),
    "subclass": lambda: _values().as_subclass(Sub),
    "without functions": lambda: _values().as_subclass(Silent),
    "own detach": lambda: _values().as_subclass(Shedding),
    "hostile": lambda: _values().as_subclass(Hostile),
    "wrapper": lambda: Index(_values()),
    "rebuilding wrapper": lambda: Rebuilding(_values()),
    "sparse": lambda: torch.eye(SIDE).to_sparse(),
    "memory of numpy": lambda: torch.from_numpy(_values().numpy().copy()),
}
SCOPES: dict[str, Scope] = {
    "stored": lambda store: tiered_offload(store, min_bytes=0),
    "small": lambda store: tiered_offload(store, min_bytes="1GiB"),
    "selected out": lambda store: tiered_offload(store, min_bytes=0, select=lambda _: False),
    "resident": lambda store: _resident(store),
    "no scope": lambda store: keep_resident(),
}


@contextmanager
def _resident(store: TierStore) -> Iterator[None]:
    with tiered_offload(store, min_bytes=0), keep_resident():
        yield


def _identity() -> AbstractContextManager[object]:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Given(NamedTuple):
    """What a backward was given, and what it made of it."""

    kind: type
    attributes: tuple[str, ...]
    is_itself: bool
    requires_grad: bool
    is_leaf: bool
    gradient: object


class SaveBoth(Function):
    """Saves an input of any kind, or its output; computes with an attribute that was set on it."""

    given: torch.Tensor

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, saved: torch.Tensor | None) -> torch.Tensor:
        result = weight * 2
        if saved is None:
            result.scale = 3.0  # type: ignore[attr-defined]
            ctx.save_for_backward(result)
        else:
            ctx.save_for_backward(saved)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        SaveBoth.given = ctx.saved_tensors[0]
        return gradient * SaveBoth.given.__dict__.get("scale", 7.0), None


def _saved_and_given(
    saved: torch.Tensor | None,
    scope: AbstractContextManager[object],
    settle: Callable[[], None],
    *,
    is_alive: bool,
    late: float | None = None,
) -> Given:
    weight = torch.ones(SIDE, requires_grad=True)
    held = [saved]
    del saved
    with scope:
        result = SaveBoth.apply(weight, held[0])
    if late is not None:
        held[0].scale = late  # type: ignore[union-attr]
    if not is_alive:
        held.clear()
    settle()
    (gradient,) = torch.autograd.grad(result.sum(), weight)
    given = SaveBoth.given
    del SaveBoth.given
    return Given(
        type(given),
        tuple(given.__dict__),
        bool(held) and given is held[0],
        _ask(given, torch.Tensor.requires_grad),
        _ask(given, torch.Tensor.is_leaf),
        bits(gradient),
    )


def _ask(tensor: torch.Tensor, about: Any) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(about.__get__(tensor))


def _nothing() -> None:
    pass


def _with_attribute(make: Make, requires_grad: bool) -> torch.Tensor:
    made = make()
    made.scale = 3.0  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunction():
        return made.requires_grad_(requires_grad)


WITH_EACH_BUDGET = pytest.mark.parametrize(
    ("scope", "host_bytes"), [("stored", 0), ("stored", "20KiB"), *((scope, "1GiB") for scope in SCOPES)]
)


@WITH_EACH_BUDGET
def test_leaf_with_an_attribute_comes_back_as_without_hooks_of_ours(
    make_store: MakeStore, scope: str, host_bytes: int | str
) -> None:
    """What requires no gradient: the very object, alive elsewhere or not, with every budget."""
    store = make_store(host_bytes=host_bytes)
    for kind, requires_grad, is_alive in product(CLASSES, (False, True), (False, True)):
        make = partial(_with_attribute, CLASSES[kind], requires_grad)
        expected = _saved_and_given(make(), _identity(), _nothing, is_alive=is_alive)
        # Not within the assertion, where pytest would keep the tensor alive.
        found = _saved_and_given(make(), SCOPES[scope](store), store.flush, is_alive=is_alive)
        assert found == expected, kind
        if not requires_grad:
            assert expected.attributes[-1] == "scale"
            assert expected.is_itself == is_alive


@WITH_EACH_BUDGET
def test_without_an_attribute_comes_back_with_its_class_and_one_set_later(
    make_store: MakeStore, scope: str, host_bytes: int | str
) -> None:
    store = make_store(host_bytes=host_bytes)
    for kind, (is_alive, late) in product(CLASSES, ((True, None), (False, None), (True, 5.0))):
        make = CLASSES[kind]
        expected = _saved_and_given(make(), _identity(), _nothing, is_alive=is_alive, late=late)
        found = _saved_and_given(make(), SCOPES[scope](store), store.flush, is_alive=is_alive, late=late)
        assert found == expected, kind


def test_scope_that_is_traced_gives_the_same_objects(store: TierStore, tmp_path: Path) -> None:
    for kind in ("plain", "view", "subclass"):
        for make in (CLASSES[kind], partial(_with_attribute, CLASSES[kind], requires_grad=False)):
            expected = _saved_and_given(make(), _identity(), _nothing, is_alive=True)
            scope = tiered_offload(store, min_bytes=0, trace=tmp_path / "trace")
            assert _saved_and_given(make(), scope, store.flush, is_alive=True) == expected


@pytest.mark.parametrize("settle", [True, False], ids=["registered", "tracked"])
def test_view_is_gone_its_base_is_not_taken_for_it(store: TierStore, settle: bool) -> None:
    """Of the same geometry, but of another class, and with attributes of its own."""
    base: torch.Tensor = torch.Tensor._make_subclass(Sub, _values())  # type: ignore[attr-defined]
    base.scale = 3.0  # type: ignore[attr-defined]

    def given(scope: AbstractContextManager[object]) -> Given:
        saved = [base.as_subclass(torch.Tensor)]
        assert saved[0]._base is base
        return _saved_and_given(saved.pop(), scope, store.flush if settle else _nothing, is_alive=False)

    found = given(tiered_offload(store, min_bytes=0))
    assert found == given(_identity())
    assert (found.kind, found.attributes) == (torch.Tensor, ())


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_result_of_an_operation_comes_back_as_without_hooks_of_ours(store: TierStore, scope: Scope) -> None:
    """What requires gradients is a new tensor each time, of no subclass unless `__torch_dispatch__` makes one."""

    def result(kind: str) -> torch.Tensor:
        made = _with_attribute(CLASSES[kind], requires_grad=True)
        made = made.view_as(made) if made.__dict__.keys() == {"scale"} else made * 1
        made.scale = 3.0  # type: ignore[attr-defined]
        return made

    for kind, is_alive in product(CLASSES.keys() - {"sparse", "hostile"}, (True, False)):
        expected = _saved_and_given(result(kind), _identity(), _nothing, is_alive=is_alive)
        found = _saved_and_given(result(kind), scope(store), store.flush, is_alive=is_alive)
        assert found == expected, kind
        assert not expected.is_leaf
    expected = _saved_and_given(None, _identity(), _nothing, is_alive=False)  # an output
    assert _saved_and_given(None, scope(store), store.flush, is_alive=False) == expected


def test_attribute_of_a_result_set_after_packing_as_without_hooks_of_ours(store: TierStore) -> None:
    """A `detach` that hands attributes on is asked when backward begins, as long as the result lives."""

    def given(scope: AbstractContextManager[object]) -> Given:
        made = Rebuilding(_values(), requires_grad=True)
        return _saved_and_given(made * 1, scope, store.flush, is_alive=True, late=5.0)

    found = given(tiered_offload(store, min_bytes=0))
    assert found == given(_identity())
    assert found.attributes == ("data_", "scale")


def test_subclass_that_answers_nobody_is_not_asked(store: TierStore) -> None:
    saved = _values().as_subclass(Hostile)
    weight = torch.ones(SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        result = SaveBoth.apply(weight, saved)
    with torch._C.DisableTorchFunction():
        nbytes = saved.nbytes
    assert store.stats().kept_bytes["unsupported"] == nbytes
    result.sum().backward()
    assert SaveBoth.given is saved
    del SaveBoth.given


def test_only_attributes_that_would_come_back_keep_a_tensor_in_memory(store: TierStore) -> None:
    weight = torch.ones(SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        with_one, without = _values(), _values()
        with_one.scale = 3.0  # type: ignore[attr-defined]
        results = [SaveBoth.apply(weight, saved) for saved in (with_one, without)]
        results.append(SaveBoth.apply(weight, None))  # an output, whose attribute autograd does not give back
        del with_one, without
    store.flush()
    stats = store.stats()
    nbytes = SIDE * SIDE * 4
    assert stats.kept_bytes["unsupported"] == nbytes
    assert stats.packed_bytes == nbytes + SIDE * 4
    del results


def test_stored_tensor_is_not_asked_for_attributes_by_making_it_a_dict(store: TierStore) -> None:
    """A packed tensor has no dict that it had not before: one for each would be memory and time."""
    weight, saved = torch.ones(SIDE, requires_grad=True), _values()
    with tiered_offload(store, min_bytes=0):
        result = SaveBoth.apply(weight, saved)
    assert not any(isinstance(referent, dict) for referent in gc.get_referents(saved))
    result.sum().backward()
    del SaveBoth.given


def _edited(around: Around, settle: Callable[[], None], saved: torch.Tensor, edit: Callable[[Any], None]) -> object:
    weight = torch.ones(SIDE, requires_grad=True)
    with around():
        result = SaveBoth.apply(weight, saved)
    edit(saved)
    settle()
    try:
        result.sum().backward()
    except RuntimeError as error:
        return "in place" if "modified by an inplace operation" in str(error) else error
    given = SaveBoth.given
    del SaveBoth.given
    plain = given.data_ if isinstance(given, Index) else given.to_dense()
    return bits(plain.as_subclass(torch.Tensor))


def _double(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def _replace(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor.data)


def _replace_and_double(tensor: torch.Tensor) -> None:
    _replace(tensor)
    _double(tensor)


@pytest.mark.parametrize("scope", ["stored", "small"])
@pytest.mark.parametrize("edit", [_double, _replace, _replace_and_double])
def test_changed_as_plain(store: TierStore, edit: Callable[[Any], None], scope: str) -> None:
    """In place: refused. By `.data`, of what requires no gradient: it has other memory, as for plain PyTorch."""
    # PyTorch replaces no data of a sparse tensor; of a wrapper, it does not replace what is wrapped.
    not_replaced = set() if edit is _double else {"wrapper", "rebuilding wrapper", "sparse"}
    for kind in CLASSES.keys() - {"hostile"} - not_replaced:
        found = _edited(lambda: SCOPES[scope](store), store.flush, CLASSES[kind](), edit)
        assert found == _edited(nullcontext, _nothing, CLASSES[kind](), edit), kind
        assert (found == "in place") == (edit is not _replace), kind


def test_result_of_a_wrapper_changed_in_place_is_refused(store: TierStore) -> None:
    """Its alias is another wrapper, of the same version counter."""
    saved = Rebuilding(_values(), requires_grad=True) * 1
    assert type(saved) is Rebuilding
    weight = torch.ones(SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        result = SaveBoth.apply(weight, saved)
    _double(saved)
    del saved
    with pytest.raises(ModifiedInPlaceError):
        result.sum().backward()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_graph_dropped_kept_objects_go_without_the_collector(store: TierStore, scope: Scope) -> None:
    class SaveOutput(Function):
        @staticmethod
        def forward(ctx: Any, index: torch.Tensor) -> torch.Tensor:
            result = index * 2
            result.scale = 3.0
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def graph() -> list[weakref.ref[Any]]:
        leaf = Rebuilding(_values(), requires_grad=True)
        frozen = _with_attribute(_values, requires_grad=False)
        with scope(store):
            output = SaveOutput.apply(leaf)
            assert type(output) is Rebuilding
            other = SaveBoth.apply(torch.ones(SIDE, requires_grad=True), frozen)
        watched = [weakref.ref(tensor) for tensor in (output, output.data_, frozen, other)]
        del output, frozen
        assert watched[2]() is not None  # the graph's, as it is without hooks
        return watched

    assert [watched() for watched in graph()] == [None] * 4


class SumTimesScale(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors
        return gradient * saved.sum() * getattr(saved, "scale", 7.0), None


@pytest.mark.parametrize(("kind", "scope"), [("plain", "stored"), ("subclass", "small")])
def test_compiled_autograd_sees_class_and_attributes(store: TierStore, kind: str, scope: str) -> None:
    torch._dynamo.reset()
    weight, saved = torch.ones(SIDE, requires_grad=True), _with_attribute(CLASSES[kind], requires_grad=False)
    SumTimesScale.apply(weight, saved).sum().backward()
    expected, weight.grad = weight.grad, None
    with SCOPES[scope](store):
        loss = SumTimesScale.apply(weight, saved).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert bits(weight.grad) == bits(expected)
