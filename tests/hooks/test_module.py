"""`offload_module`, and what its and `tiered_offload`'s arguments may be."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.programs import SIDE, Around, Mlp, assert_same_gradients, bits, grads
from tierstore import ConfigError, TierStore, keep_resident, offload_module, tiered_offload

Settle = Callable[[], None]


def wrapped(module: nn.Module, around: Around, store: TierStore, **options: Any) -> nn.Module:
    """Under the store's scope; the module itself where the run is the plain one."""
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


def test_wrapped_blocks_of_a_model_the_rest_stays(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> list[torch.Tensor | None]:
        model = nn.Sequential(Mlp().layers, nn.Tanh(), Mlp().layers)
        model[2] = wrapped(model[2], around, store)
        loss = model(torch.randn(SIDE, SIDE)).square().sum()
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


def test_wrapped_module_state_dict_round_trip(store: TierStore) -> None:
    module, other = offload_module(Mlp(), store=store), offload_module(Mlp(), store=store)
    state = module.state_dict()
    assert list(state) == [f"module.{name}" for name in Mlp().state_dict()]
    other.load_state_dict(state)
    assert all(bits(one) == bits(two) for one, two in zip(module.parameters(), other.parameters(), strict=True))


def test_wrapped_module_copied_works_over_the_same_store(store: TierStore) -> None:
    """As an average of weights does, and `nn.TransformerEncoder` with its layer."""
    original = offload_module(Mlp(), store=store, min_bytes=0)
    duplicate = copy.deepcopy(original)
    duplicate(torch.randn(SIDE, SIDE)).backward()
    assert store.stats().packed_tensors > 0
    assert all(parameter.grad is None for parameter in original.parameters())
    assert all(parameter.grad is not None for parameter in duplicate.parameters())


def test_wrapped_module_on_other_threads_hooks_in_force_there(store: TierStore) -> None:
    """Replicas, each on its own thread, with parts of one batch; as `DataParallel` runs them."""
    plain = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh())
    batches = torch.randn(3, SIDE, SIDE)

    def gradients(module: nn.Module) -> list[Any]:
        losses = {}

        def forward(number: int) -> None:
            torch.set_num_threads(1)  # counts for the thread that says so
            losses[number] = module(batches[number]).exp().sum()

        threads = [threading.Thread(target=forward, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.flush()
        return [bits(torch.autograd.grad(losses[number], [plain[0].weight])[0]) for number in range(3)]

    assert gradients(offload_module(plain, store=store, min_bytes=0)) == gradients(plain)
    assert store.stats().packed_tensors >= 6


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

    with pytest.raises(ConfigError, match=r"module=.*a generator function, .*enter the scope inside it"):
        offload_module(Lazy(), store=store)


def test_keep_resident_inside_a_wrapped_module(store: TierStore) -> None:
    class Block(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            with keep_resident():
                return batch.exp().sin()

    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    offload_module(Block(), store=store, min_bytes=0)(weight).sum().backward()
    assert store.stats().packed_tensors == 0
