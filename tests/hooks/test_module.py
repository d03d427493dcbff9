"""`offload_module`, and what its and `tiered_offload`'s arguments may be."""

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Mlp, bits
from tierstore import (
    ConfigError,
    StoreClosedError,
    TierStore,
    offload_module,
    remove_offload,
    tiered_offload,
)
from tierstore.tensors.torch_names import top_hooks


def test_offloaded_module_stays_itself(store: TierStore) -> None:
    """Type, keys, signature, attributes, and what others have hooked on: all as before."""
    module, calls = Mlp(), []
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.name = "mine"  # type: ignore[assignment]
    before = (type(module), list(module.state_dict()), inspect.signature(module.forward), repr(module))
    of_calls = inspect.signature(module.__call__)
    assert offload_module(module, store=store, min_bytes=0) is module
    after = (type(module), list(module.state_dict()), inspect.signature(module.forward), repr(module))
    assert after == before
    assert inspect.signature(module.__call__) == of_calls
    module(torch.randn(SIDE, SIDE)).backward()
    assert calls == ["forward"]
    assert store.stats().packed_tensors > 0
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    (plain := Mlp()).load_state_dict(torch.load(file, weights_only=True))
    module.load_state_dict(plain.state_dict())
    assert all(bits(one) == bits(two) for one, two in zip(module.parameters(), plain.parameters(), strict=True))


def test_copy_of_an_offloaded_module_stores_too_and_trains_its_own_weights(store: TierStore) -> None:
    """As an average of weights does, and `nn.TransformerEncoder` with its layer."""
    original = offload_module(Mlp(), store=store, min_bytes=0)
    duplicate = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.mul_(2)
    batch = torch.randn(SIDE, SIDE)
    assert bits(duplicate(batch)) != bits(original(batch))
    before = store.stats().packed_tensors
    duplicate(batch).backward()
    assert store.stats().packed_tensors > before
    assert all(parameter.grad is None for parameter in original.parameters())
    assert all(parameter.grad is not None for parameter in duplicate.parameters())


def test_offloaded_module_pickled_is_a_plain_one_and_needs_no_tierstore(store: TierStore) -> None:
    pickled = pickle.dumps(offload_module(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()), store=store, min_bytes=0))
    assert b"tierstore." not in pickled
    before = store.stats().packed_tensors
    pickle.loads(pickled)(torch.randn(SIDE, SIDE)).sum().backward()
    assert store.stats().packed_tensors == before


def test_replica_that_shares_the_modules_attributes_uses_its_own_weights(store: TierStore) -> None:
    """`DataParallel` makes replicas by copying `__dict__`; a call bound to the original would run its weights."""
    original = offload_module(nn.Linear(SIDE, SIDE), store=store, min_bytes=0)
    replica = original._replicate_for_data_parallel()
    replica.weight = original.weight * 2
    replica.bias = original.bias
    batch, before = torch.eye(SIDE, requires_grad=True), store.stats().packed_tensors
    assert bits(replica(batch)) == bits(nn.functional.linear(batch, original.weight * 2, original.bias))
    assert store.stats().packed_tensors > before


def test_offload_removed_and_given_again(store: TierStore, make_store: MakeStore) -> None:
    module, other = offload_module(Mlp(), store=store, min_bytes=0), make_store()

    def packed_by(module: nn.Module) -> tuple[int, int]:
        before = store.stats().packed_tensors, other.stats().packed_tensors
        module(torch.randn(SIDE, SIDE)).backward()
        return store.stats().packed_tensors - before[0], other.stats().packed_tensors - before[1]

    (first, _) = packed_by(module)
    assert first > 0
    assert packed_by(Mlp()) == (0, 0), "another instance"
    assert remove_offload(module) is module
    assert packed_by(module) == (0, 0)
    assert remove_offload(module) is module
    offload_module(module, store=other, min_bytes=0)
    assert packed_by(module) == (0, first)


def test_class_with_a_call_of_its_own_and_its_base_enter_one_scope(store: TierStore) -> None:
    """Each with a `__call__`, and instances of both offloaded: the outermost one enters, and only that."""
    entered = []

    class Base(nn.Module):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            entered.append(top_hooks(False))
            return super().__call__(*args, **kwargs)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            entered.append(top_hooks(False))
            return batch.exp()

    class Derived(Base):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            entered.append(top_hooks(False))
            return super().__call__(*args, **kwargs)

    offload_module(Base(), store=store)
    module = offload_module(Derived(), store=store, min_bytes=0)
    module(torch.randn(SIDE, SIDE, requires_grad=True)).sum().backward()
    assert len(entered) == 3
    assert entered[0] is not None
    assert len({id(hooks[0].__self__) for hooks in entered}) == 1


def test_class_that_torch_exchanges_stores_before_and_after(store: TierStore) -> None:
    """As lazy modules become others in their first call, and parametrized ones until that is taken off."""

    def packed_by(module: nn.Module) -> int:
        before = store.stats().packed_tensors
        module(torch.randn(SIDE, SIDE, requires_grad=True).exp()).sum().backward()
        return store.stats().packed_tensors - before

    lazy = offload_module(nn.LazyLinear(SIDE), store=store, min_bytes=0)
    assert packed_by(lazy) == packed_by(lazy) > 0
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(SIDE, SIDE))
    assert packed_by(offload_module(normed, store=store, min_bytes=0)) > 0
    assert packed_by(nn.utils.parametrize.remove_parametrizations(normed, "weight")) > 0
    plain = offload_module(nn.Linear(SIDE, SIDE), store=store, min_bytes=0)
    assert packed_by(nn.utils.parametrizations.weight_norm(plain)) > 0


def test_call_that_wraps_the_one_of_its_base_stores(store: TierStore) -> None:
    """`functools.wraps` copies the attributes of the base's `__call__`, which looked for a scope already."""

    class Base(Mlp):
        pass

    offload_module(Base(), store=store)

    class Derived(Base):
        @functools.wraps(Base.__call__)
        def __call__(self, *args: Any) -> Any:
            return nn.Module.__call__(self, *args)

    module = offload_module(Derived(), store=store, min_bytes=0)
    module(torch.randn(SIDE, SIDE)).backward()
    assert store.stats().packed_tensors > 0


def test_offloaded_module_can_be_exported_and_traced(store: TierStore) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = offload_module(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()), store=store, min_bytes=0)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layers(batch) * 2

    net, batch = Net(), torch.randn(SIDE, SIDE)
    expected = bits(net(batch))
    assert bits(torch.fx.symbolic_trace(net)(batch)) == expected
    assert bits(torch.export.export(net, (batch,), strict=False).module()(batch)) == expected
    with pytest.raises(Exception, match="a store's calls cannot be traced"):
        torch.export.export(net, (batch,), strict=True)
    remove_offload(net.layers)
    assert bits(torch.export.export(net, (batch,), strict=True).module()(batch)) == expected


def test_closed_store_lets_evaluation_run_and_says_so_in_training(store: TierStore) -> None:
    module = offload_module(Mlp(), store=store, min_bytes=0)
    store.close()
    with torch.no_grad():
        module(torch.randn(SIDE, SIDE))
    with pytest.raises(StoreClosedError, match="it was closed"):
        module(torch.randn(SIDE, SIDE))
    remove_offload(module)(torch.randn(SIDE, SIDE)).backward()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_offloaded_module_interrupted_leaves_no_hook(store: TierStore, error: type[BaseException]) -> None:
    class Failing(nn.Module):
        def forward(self, first: int, *, second: int) -> dict[str, object]:
            if second:
                raise error
            return {"first": first, "training": self.training}

    module = offload_module(nn.Sequential(Failing())[0], store=store)
    with pytest.raises(error):
        module(1, second=1)
    assert top_hooks(False) is None
    assert module(1, second=0) == {"first": 1, "training": True}
    assert module.eval()(1, second=0) == {"first": 1, "training": False}


def test_wrapped_module_options_reach_the_scope(store: TierStore) -> None:
    module = offload_module(Mlp(), store=store, min_bytes=0, select=lambda tensor: False)
    module(torch.randn(SIDE, SIDE)).backward()
    assert store.stats().packed_tensors == 0
    assert store.stats().kept_bytes["selected out"] > 0
    offload_module(Mlp(), store=store, min_bytes="1GiB")(torch.randn(SIDE, SIDE)).backward()
    assert store.stats().packed_tensors == 0
    assert store.stats().kept_bytes["small"] > 0


BAD: list[tuple[str, Any, str]] = [
    ("min_bytes", "12 parsecs", "8GiB"),
    ("min_bytes", -1, "0 or more"),
    ("lookahead_bytes", 1.5, "8GiB"),
    ("device_bytes", True, "8GiB"),
    ("prefetch", "psychic", "'learned', 'reverse', 'none'"),
    ("prefetch", ["learned"], "'learned', 'reverse', 'none'"),  # which is not hashable
    ("select", "all", "callable"),
    ("min_byte", 3, "min_bytes"),
]


@pytest.mark.parametrize(
    "enter", [tiered_offload, lambda store, **options: offload_module(Mlp(), store=store, **options)]
)
def test_bad_argument_one_config_error_with_given_and_allowed(store: TierStore, enter: Callable[..., object]) -> None:
    for option, given, allowed in BAD:
        with pytest.raises(ConfigError) as caught:
            enter(store, **{option: given})
        assert (caught.value.option, caught.value.given) == (option, given)
        assert allowed in caught.value.allowed
        assert repr(given) in str(caught.value)


class Lazy(nn.Module):
    def forward(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        yield values.exp()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "module=None"),
        (torch.relu, "module="),
        (nn.Linear, "module="),
        (nn.ModuleList([Mlp()]), "ModuleList.*no forward.*give its members"),
        (Lazy(), "module=.*a generator function: .*Enter the scope inside it"),
    ],
)
def test_no_module_or_none_that_can_be_offloaded_one_config_error(store: TierStore, module: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}") as caught:
        offload_module(module, store=store)
    assert caught.value.option == "module"


@pytest.mark.parametrize("not_a_store", [None, "/nvme", TierStore, object()], ids=["None", "path", "class", "object"])
def test_no_store_one_config_error(not_a_store: Any) -> None:
    for make in (tiered_offload, lambda given: offload_module(Mlp(), store=given)):
        with pytest.raises(ConfigError) as caught:
            make(not_a_store)
        assert (caught.value.option, caught.value.given) == ("store", not_a_store)
        assert "TierStore" in str(caught.value)
