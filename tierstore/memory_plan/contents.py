"""What a plan consists of, as a file has it."""

from __future__ import annotations

import msgspec

from .applied import BlockTraits
from .choice import Corrected, TriedDecision
from .decision import Decision
from .menu import Action, HeldOutput

__all__ = ["FORMAT", "BlockPlan", "Contents", "Predicted", "contents_of"]

FORMAT = 1


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step needs.

    Attributes:
        peak_bytes: the most memory.
        step_seconds: of forward and backward.
    """

    peak_bytes: int
    step_seconds: float


class BlockPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done with one block.

    Attributes:
        name: of the module, as in `named_modules`.
        module: its class.
        action: "keep", "store" or "recompute".
        stores: of "recompute": the block's inputs and held outputs go to the store.
        held: of "recompute": operators whose outputs are held, as (number of the call, operator).
        buffers: its buffers that forward changes.
        evaluates: its modules that were in evaluation mode, by their names in it. Called in another mode, the block is
            not computed again.
        saved_bytes: what autograd saves in it.
        kept_bytes, stored_bytes: what stays in memory until backward, and what goes to the store.
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
    """A plan as a file has it.

    Attributes:
        format: of the file.
        limit_bytes: for the peak.
        reserve_bytes: of it, for what the program will take later.
        min_bytes: smaller tensors are not stored.
        tier: what is limited, in words.
        predicted: peak and step under the plan.
        strategies: of each single strategy, by its name.
        blocks: what is done with each block.
        num_calls: how often a step calls the model.
        staging_bytes: of the store's staging window meanwhile; 0: as it was opened.
    """

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


def contents_of(
    choice: TriedDecision, corrected: Corrected, limit_bytes: int, reserve_bytes: int, tier: str
) -> Contents:
    """The contents of the plan of a choice. `tier`: what is limited, in words."""
    prices = corrected.prices
    uniform = {
        "keep everything": Action("keep"),
        "store everything": Action("store"),
        "recompute every block": Action("recompute"),
    }
    strategies = {name: _predicted(prices.uniform(action), reserve_bytes) for name, action in uniform.items()}
    predicted = Predicted(choice.measured.peak_bytes + reserve_bytes, choice.measured.seconds)
    blocks = _blocks(choice.decision, corrected)
    return Contents(
        FORMAT,
        limit_bytes,
        reserve_bytes,
        prices.min_bytes,
        tier,
        predicted,
        strategies,
        blocks,
        prices.num_calls,
        choice.decision.staging_bytes or 0,
    )


def _predicted(decision: Decision, reserve_bytes: int) -> Predicted:
    return Predicted(decision.peak_bytes + reserve_bytes, decision.step_seconds)


def _blocks(decision: Decision, corrected: Corrected) -> tuple[BlockPlan, ...]:
    prices = corrected.prices
    blocks = []
    for name, option in decision.chosen.items():
        saved = next(other for other in prices.options[name] if other.action == Action("keep")).kept
        action = option.action
        blocks.append(
            BlockPlan(
                name,
                prices.kinds[name],
                action.kind,
                action.stores,
                tuple((output.number, output.name) for output in action.held),
                tuple(prices.traits[name].buffers),
                tuple(prices.traits[name].evaluates),
                sum(saved.values()),
                sum(option.kept.values()),
                sum(option.stored.values()),
                prices.differs.get(name, ""),
            )
        )
    return tuple(blocks)
