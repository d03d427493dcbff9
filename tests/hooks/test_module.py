"""`offload_module`, and what its and `tiered_offload`'s arguments may be."""

import copy
import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Mlp, Settle, assert_same_gradients, bits, grads
from tierstore import (
    ConfigError,
    StoreClosedError,
    TierStore,
    offload_module,
    remove_offload,
    tiered_offload,
)
from tierstore.hooks.in_place import put_around_calls
from tierstore.residency.torch_names import top_hooks


def wrapped(module: nn.Module, around: Around, store: TierStore, **options: Any) -> nn.Module:
    plain = not isinstance(around(), tiered_offload)
    return module if plain else offload_module(module, store=store, **({"min_bytes": 0} | options))


def test_wrapped_module_same_bits(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> list[torch.Tensor | None]:
        model = Mlp()
        forward = wrapped(model, around, store)
        for _ in range(2):
            loss = forward(torch.randn(SIDE, SIDE))
            settle()
            loss.backward()
        return grads(model)

    assert_same_gradients(program, store)


def test_wrapped_module_arguments_results_and_mode_pass_through(store: TierStore) -> None:
    class Odd(nn.Module):
        def forward(self, first: int, *, second: int) -> dict[str, object]:
            return {"sum": first + second, "training": self.training}

    module = offload_module(Odd(), store=store)
    assert module(1, second=2) == {"sum": 3, "training": True}
    assert module.eval()(1, second=2) == {"sum": 3, "training": False}


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


def test_state_of_an_offloaded_module_loads_into_a_plain_one_and_back(store: TierStore) -> None:
    module, plain = offload_module(Mlp(), store=store), Mlp()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
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


def test_instances_that_were_not_offloaded_store_nothing(store: TierStore) -> None:
    class Mine(Mlp):
        pass

    offload_module(Mine(), store=store, min_bytes=0)
    for plain in (Mine(), Mlp()):
        plain(torch.randn(SIDE, SIDE)).backward()
    assert store.stats().packed_tensors == 0


def test_offload_removed_and_given_again(store: TierStore, make_store: MakeStore) -> None:
    module, other = offload_module(Mlp(), store=store, min_bytes=0), make_store()

    def packed_by(module: nn.Module) -> tuple[int, int]:
        before = store.stats().packed_tensors, other.stats().packed_tensors
        module(torch.randn(SIDE, SIDE)).backward()
        return store.stats().packed_tensors - before[0], other.stats().packed_tensors - before[1]

    (first, _) = packed_by(module)
    assert first > 0
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


def test_call_that_somebody_else_puts_on_the_class_keeps_the_scope(store: TierStore, monkeypatch: Any) -> None:
    class Mine(Mlp):
        pass

    module, calls = offload_module(Mine(), store=store, min_bytes=0), []
    own = Mine.__call__

    def traced(self: nn.Module, *args: Any) -> Any:
        calls.append(self)
        return own(self, *args)

    monkeypatch.setattr(Mine, "__call__", traced)
    module(torch.randn(SIDE, SIDE)).backward()
    assert calls == [module]
    assert store.stats().packed_tensors > 0


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


def test_call_that_somebody_else_wraps_on_the_class_goes_through_once() -> None:
    """Also for a module that something is put around after that."""

    class Mine(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch

    class Counting:
        num_calls = 0

        def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.num_calls += 1
            return call(*args, **kwargs)

    modules, counts = [Mine(), Mine()], [Counting(), Counting()]
    put_around_calls(modules[0], counts[0])
    own = Mine.__call__
    Mine.__call__ = functools.wraps(own)(lambda self, *args: own(self, *args))
    put_around_calls(modules[1], counts[1])
    for module in modules:
        module(torch.randn(SIDE, SIDE))
    assert [each.num_calls for each in counts] == [1, 1]


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


def test_module_without_a_forward_refused(store: TierStore) -> None:
    with pytest.raises(ConfigError, match=r"ModuleList.*no forward.*give its members"):
        offload_module(nn.ModuleList([Mlp()]), store=store)


def test_replicas_with_copied_weights_on_threads_gradients_reach_the_original(store: TierStore) -> None:
    """As `torch.nn.parallel.replicate` makes them: a replica's weights are part of the graph, and end with it."""

    def replica_of(module: nn.Module) -> nn.Module:
        replica = copy.deepcopy(module)
        for name, parameter in module.named_parameters():
            owner, _, last = name.rpartition(".")
            part = replica.get_submodule(owner)
            del part._parameters[last]
            setattr(part, last, parameter * 1)
        return replica

    def program(around: Around, settle: Settle) -> list[torch.Tensor | None]:
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
        replicas = [replica_of(wrapped(model, around, store)) for _ in range(3)]
        batches, losses = torch.randn(3, SIDE, SIDE), {}

        def forward(number: int) -> None:
            torch.set_num_threads(1)  # counts for the thread that says so
            losses[number] = replicas[number](batches[number]).exp().sum()

        threads = [threading.Thread(target=forward, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        replicas.clear()
        settle()
        torch.stack([losses[number] for number in range(3)]).sum().backward()
        return grads(model)

    assert_same_gradients(program, store)
    # Of each replica: the copied weight of its second layer, which nobody else holds any more, and that layer's input.
    assert store.stats().spilled_bytes == 3 * 2 * SIDE * SIDE * 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_offloaded_module_interrupted_leaves_no_hook(store: TierStore, error: type[BaseException]) -> None:
    class Failing(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(error):
        offload_module(nn.Sequential(Failing()), store=store)(torch.randn(2))
    assert top_hooks(False) is None


def test_wrapped_module_that_raises_hooks_removed(store: TierStore) -> None:
    module = offload_module(nn.Linear(3, 3), store=store, min_bytes=0)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 2))
    before = store.stats().packed_tensors
    torch.randn(SIDE, requires_grad=True).exp().sum().backward()
    assert store.stats().packed_tensors == before


def test_wrapped_module_options_reach_the_scope(store: TierStore) -> None:
    module = offload_module(Mlp(), store=store, min_bytes=0, select=lambda tensor: False)
    module(torch.randn(SIDE, SIDE)).backward()
    assert store.stats().packed_tensors == 0
    assert store.stats().kept_bytes["selected out"] > 0
    offload_module(Mlp(), store=store, min_bytes="1GiB")(torch.randn(SIDE, SIDE)).backward()
    assert store.stats().packed_tensors == 0
    assert store.stats().kept_bytes["small"] > 0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"min_bytes": "12 parsecs"}, "8GiB"),
    "negative size": ({"min_bytes": -1}, "0 or more"),
    "fractional size": ({"lookahead_bytes": 1.5}, "8GiB"),
    "bool as size": ({"device_bytes": True}, "8GiB"),
    "prefetch": ({"prefetch": "psychic"}, "'learned', 'reverse', 'none'"),
    "prefetch not hashable": ({"prefetch": ["learned"]}, "'learned', 'reverse', 'none'"),
    "select": ({"select": "all"}, "callable"),
    "option": ({"min_byte": 3}, "min_bytes"),
}


@pytest.mark.parametrize(
    "enter", [tiered_offload, lambda store, **options: offload_module(Mlp(), store=store, **options)]
)
@pytest.mark.parametrize(("options", "allowed"), BAD.values(), ids=BAD.keys())
def test_bad_argument_one_config_error_with_given_and_allowed(
    store: TierStore, enter: Callable[..., object], options: dict[str, Any], allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        enter(store, **options)
    ((option, given),) = options.items()
    assert caught.value.option == option
    assert caught.value.given == given
    assert allowed in caught.value.allowed
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("not_a_store", [None, "/nvme", TierStore, object()], ids=["None", "path", "class", "object"])
def test_no_store_one_config_error(not_a_store: Any) -> None:
    for make in (tiered_offload, lambda given: offload_module(Mlp(), store=given)):
        with pytest.raises(ConfigError) as caught:
            make(not_a_store)
        assert (caught.value.option, caught.value.given) == ("store", not_a_store)
        assert "TierStore" in str(caught.value)


@pytest.mark.parametrize("module", [None, torch.relu, nn.Linear])
def test_no_module_one_config_error(store: TierStore, module: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        offload_module(module, store=store)
    assert caught.value.option == "module"


def test_module_whose_forward_runs_after_its_call_refused(store: TierStore) -> None:
    class Lazy(nn.Module):
        def forward(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
            yield values.exp()

    with pytest.raises(ConfigError, match=r"module=.*a generator function: .*Enter the scope inside it"):
        offload_module(Lazy(), store=store)
