"""What a plan consists of, as a file has it."""

from __future__ import annotations

import msgspec

from .choice import TriedDecision
from .decision import Prices
from .menu import Action, BlockTraits, HeldOutput, Option

FORMAT = 1


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most memory that a step needs, and the seconds of its forward and backward."""

    peak_bytes: int
    step_seconds: float


class BlockPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done with one block: a module by its name in `named_modules`, and its class.

    Attributes:
        action: "keep", "store" or "recompute".
        stores: of "recompute": the block's inputs and held outputs go to the store.
        held: of "recompute": operators whose outputs are held, as (number of the call, operator).
        buffers: its buffers that forward changes.
        evaluates: its modules that were in evaluation mode, by their names in it. Called in another mode, the block is
            not computed again.
        saved_bytes, kept_bytes, stored_bytes: what autograd saves in it, and what of that stays in memory until
            backward or goes to the store.
        differs: why it must not be computed again; "": it may be.
    """

    name: str
    module: str
    action: str
    stores: bool = False
    held: tuple[tuple[int, str], ...] = ()
    buffers: tuple[str, ...] = ()
    evaluates: tuple[str, ...] = ()
    saved_bytes: int = 0
    kept_bytes: int = 0
    stored_bytes: int = 0
    differs: str = ""

    @property
    def traits(self) -> BlockTraits:
        return BlockTraits(self.buffers, self.evaluates)

    def as_action(self) -> Action:
        held = tuple(HeldOutput(number, name) for number, name in self.held)
        return Action(self.action, held, self.stores)  # type: ignore[arg-type]


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as a file has it. `reserve_bytes`: of the limit, for what the program takes later. `min_bytes`: smaller
    tensors are not stored. `tier`: what is limited, in words. `num_calls`: how often a step calls the model.
    `staging_bytes`: of the store's window meanwhile; 0: as it was opened."""

    format: int
    limit_bytes: int
    reserve_bytes: int
    min_bytes: int
    tier: str
    predicted: Predicted
    strategies: dict[str, Predicted]
    blocks: tuple[BlockPlan, ...]
    num_calls: int = 1
    staging_bytes: int = 0

    @property
    def is_needed(self) -> bool:
        return any(block.action != "keep" for block in self.blocks)


def contents_of(choice: TriedDecision, prices: Prices, limit_bytes: int, reserve_bytes: int, tier: str) -> Contents:
    """The contents of the plan of a choice."""
    singly = {"keep everything": "keep", "store everything": "store", "recompute every block": "recompute"}
    strategies = {name: prices.uniform(Action(kind)) for name, kind in singly.items()}  # type: ignore[arg-type]
    return Contents(
        FORMAT,
        limit_bytes,
        reserve_bytes,
        prices.min_bytes,
        tier,
        Predicted(choice.measured.peak_bytes + reserve_bytes, choice.measured.seconds),
        {name: Predicted(each.peak_bytes + reserve_bytes, each.step_seconds) for name, each in strategies.items()},
        tuple(_block(name, option, prices) for name, option in choice.decision.chosen.items()),
        prices.num_calls,
        choice.decision.staging_bytes or 0,
    )


def _block(name: str, option: Option, prices: Prices) -> BlockPlan:
    kept = next(other.kept for other in prices.options[name] if other.action == Action("keep"))
    action, traits = option.action, prices.traits[name]
    return BlockPlan(
        name,
        prices.kinds[name],
        action.kind,
        action.stores,
        tuple((output.number, output.name) for output in action.held),
        tuple(traits.buffers),
        tuple(traits.evaluates),
        sum(kept.values()),
        sum(option.kept.values()),
        sum(option.stored.values()),
        prices.differs.get(name, ""),
    )
