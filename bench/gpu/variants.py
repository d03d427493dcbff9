"""Ways to have less on the device than forward saves: what is put around forward, or done to the model, for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.peers import checkpoint_blocks, save_on_cpu
from tierstore import TierStore, offload_module, plan_memory, tiered_offload

from .models import Decoder, ResNet

Options = dict[str, Any]
VARIANTS = (
    "none",
    "save_on_cpu",
    "OffloadActivations",
    "checkpoint",
    "checkpoint, save_on_cpu",
    "tierstore",
    "tierstore, checkpoint",
    "tierstore, plan",
)

_WHERE_OFFLOAD_ACTIVATIONS_IS = ("torchtune.training", "trl.models.activation_offloading")


class Prepared(NamedTuple):
    """A variant, ready to train: what makes the scope of one forward, and the store whose figures to tell."""

    around: Callable[[], AbstractContextManager[Any]]
    store: TierStore | None = None


@contextmanager
def prepare(
    variant: str, model: ResNet | Decoder, batch: tuple[Tensor, ...], scratch: Path, options: Options
) -> Iterator[Prepared]:
    """Open what the variant needs; ends it with the block. `options`: as `TierStore` and `tiered_offload` take them;
    `limit` is that of a plan. Checkpoints are offloaded as transformers and accelerate do: each block, with its inputs.
    Raises ImportError: the variant is of a package that is not installed."""
    device = batch[0].device
    if "checkpoint" in variant:
        checkpoint_blocks(model.blocks)
    if variant in ("none", "checkpoint"):
        yield Prepared(nullcontext)
    elif variant == "save_on_cpu":
        yield Prepared(lambda: save_on_cpu(pin_memory=device.type == "cuda"))
    elif variant == "checkpoint, save_on_cpu":
        for block in model.blocks:
            block.forward = partial(_saved_on_cpu, block.forward, device.type == "cuda")
        yield Prepared(nullcontext)
    elif variant == "OffloadActivations":
        yield Prepared(_offload_activations(device))
    elif variant.startswith("tierstore"):
        memory = {name: options[name] for name in ("host_bytes", "staging_bytes") if name in options}
        with TierStore(scratch, **memory) as store:
            scope = {name: options[name] for name in ("device_bytes", "min_bytes") if name in options}
            if variant == "tierstore, plan":
                plan = plan_memory(model, lambda: model(*batch), store, limit=options["limit"])
                print(plan, file=sys.stderr)
                plan.apply(model)
            elif variant == "tierstore, checkpoint":
                for block in model.blocks:
                    offload_module(block, store, **scope)
            else:
                yield Prepared(lambda: tiered_offload(store, **scope), store)
                return
            yield Prepared(nullcontext, store)
    else:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")


def _saved_on_cpu(call: Callable[..., Tensor], pin_memory: bool, *batch: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=pin_memory):
        return call(*batch)


def _offload_activations(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """torchtune's, or TRL's, which goes back to it; with the options that they have by default."""
    for name in _WHERE_OFFLOAD_ACTIVATIONS_IS:
        try:
            module = import_module(name)
        except ImportError:
            continue
        is_cuda = device.type == "cuda"
        return lambda: module.OffloadActivations(use_pin_memory=is_cuda, use_streams=is_cuda)
    raise ImportError("neither torchtune nor TRL can be imported")
