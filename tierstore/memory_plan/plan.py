"""`MemoryPlan`: what is done with each block, in place, in a file, as a table and as a picture."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from torch import nn

from ..base.toml_file import read_toml, toml_text, typed
from ..errors import ConfigError, ConfigTypeError
from ..hooks.in_place import Around, around_calls_of, call_plainly, check_callable, put_around_calls
from ..hooks.module import ModuleScope
from ..store.tier_store import TierStore
from .applied import PlannedCalls
from .contents import FORMAT, Contents, draw_plan, plan_text
from .decision import Prices
from .meter import meter_of
from .steps import check_is_plain
from .watch import StepWatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


def _nothing() -> None:
    return None


class MemoryPlan:
    """What is done with each block of a model, so that a step stays within a limit. `plan_memory` makes one.

    Printed, it is a table: what each block keeps, stores and computes again, and the peak and the step of the plan and
    of each single strategy.

    Attributes:
        limit_bytes: for the peak.
        predicted: peak and step under the plan.
        strategies: peak and step of each single strategy, by its name.
        blocks: what is done with each block.
        tier: what is limited, in words.
        staging_bytes: the store's staging window while the plan is applied: 32 MiB if nothing fits within the limit
            otherwise; None: as the store was opened.
        is_needed: False: everything fits, and nothing is done.
        num_steps, decision_seconds: how many steps planning has taken, and the solver's time; 0 for a plan from a file.
    """

    def __init__(
        self,
        contents: Contents,
        prices: Prices | None = None,
        store: TierStore | None = None,
        num_steps: int = 0,
        decision_seconds: float = 0.0,
    ) -> None:
        self.limit_bytes, self.tier, self.blocks = contents.limit_bytes, contents.tier, contents.blocks
        self.predicted, self.strategies = contents.predicted, contents.strategies
        self.staging_bytes, self.is_needed = contents.staging_bytes or None, contents.is_needed
        self.num_steps, self.decision_seconds = num_steps, decision_seconds
        self._contents, self._prices, self._store = contents, prices, store
        self._watch: StepWatch | None = None
        self._applied_to: Callable[[], nn.Module | None] = _nothing  # that it is applied to
        self._made: weakref.WeakSet[Around] = weakref.WeakSet()  # also those that only copies of the model have

    # --- in place --------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module, *, store: TierStore | None = None) -> nn.Module:
        """Do what the plan says in each call of the model, in place. Types, keys and attributes stay as they are.

        The first steps are measured; `store.stats().memory_plan` tells. A `TierStoreWarning` says if they exceed the
        limit.

        Args:
            model: the model that was planned, or one with the same modules.
            store: takes what is stored, and returns freed memory to the system so that the limit is kept. Default: the
                store that the plan was made with. A plan that was loaded from a file and stores something needs it. One
                that stores nothing can do without, but then nobody returns freed memory.

        Returns:
            The same model. `remove` takes the effect away.

        Raises:
            ConfigError: a block of the plan is missing or of another class, or is offloaded or planned already; the
                plan is applied already; or there is no store.
            StoreClosedError: the store is closed. The model is as it was.
        """
        if self._applied_to() is not None:
            raise ConfigError("model", type(model).__name__, "the plan is applied already: remove it first")
        modules = self._modules_of(model)
        store = self._store if store is None else store
        if store is not None:
            if not isinstance(store, TierStore):
                raise ConfigTypeError("store", store, "give an open TierStore")
            store._core.residency.guard.check_open()
        elif any(block.as_action().uses_store for block in self.blocks):
            raise ConfigError("store", None, "the plan stores something: give an open TierStore")
        meter = meter_of(model)
        scope = None if store is None else ModuleScope(store, min_bytes=self._contents.min_bytes)
        calls = {block.name: PlannedCalls(block.as_action(), block, scope) for block in self.blocks}
        self._end()  # where the model that it was applied to is gone
        self._watch = StepWatch(self._contents, meter, store)
        self._applied_to = weakref.ref(model)
        self._made.update(calls.values())
        for name, through in calls.items():
            put_around_calls(modules[name], through)
        self._made.add(watched := self._watch.around(calls.get("")))
        put_around_calls(model, watched)
        meter.tidy()
        if store is not None and meter.is_of_host:
            windows = (0, self.staging_bytes) if self.is_needed else (None, None)
            store._core.plans.keep_within(self._watch, self.limit_bytes, *windows)
        return model

    def watch(self, compute: Callable[[], T]) -> T:
        """Compute the loss by `compute`, as a step that is compared with the prediction.

        Calls of the model itself are watched anyway. This is for losses that are computed by calling its members."""
        return compute() if self._watch is None else self._watch.run(compute)

    def remove(self, model: nn.Module) -> nn.Module:
        """Undo `apply`. What is stored already stays stored until its graph is gone.

        Of a copy of the model (`copy.deepcopy`) it takes the plan away from the copy alone. Removed from the model
        itself, or from one that has it as a member, it ends everywhere: copies compute plainly from then on.

        Returns:
            The same model. If the plan is not applied, nothing is done.

        Raises:
            ConfigError: the plan is applied, but neither to this model nor to the one that this is a copy of. It stays
                applied.
        """
        check_callable(model)
        carrying = [module for module in model.modules() if around_calls_of(module) in self._made]
        if self._applied_to() in set(model.modules()):
            self._end()
        elif self._applied_to() is not None and not carrying:
            raise ConfigError("model", type(model).__name__, "the plan is applied to another model: give that")
        for module in carrying:
            call_plainly(module)
        return model

    def _end(self) -> None:
        for around in list(self._made):
            if isinstance(around, PlannedCalls):
                around.is_over = True  # backward of what was computed before is not changed by that
        watch, self._watch, self._applied_to = self._watch, None, _nothing
        if watch is not None:
            watch.end()

    def _modules_of(self, model: nn.Module) -> dict[str, nn.Module]:
        check_callable(model)
        check_is_plain("", model)
        modules = dict(model.named_modules())
        for block in self.blocks:
            module = modules.get(block.name)
            if module is None or type(module).__name__ != block.module:
                other = "" if module is None else f", not a {type(module).__name__}"
                what = f"the plan is for a model with a {block.module} of that name{other}"
                raise ConfigError("model", block.name, what)
            check_is_plain(block.name, module)
        return modules

    # --- in a file -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a TOML file; one that is there is replaced. Raises OSError."""
        text = "# A plan of memory: tierstore.MemoryPlan.load reads it.\n"
        Path(path).write_text(text + toml_text(msgspec.to_builtins(self._contents)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MemoryPlan:
        """Read a plan from a file that `save` has written.

        Raises:
            ConfigError: the file cannot be read, or is not such a plan; names file and key.
        """
        contents = typed(read_toml(Path(path), "path"), Contents, str(path))
        if contents.format != FORMAT:
            raise ConfigError(f"{path}: format", contents.format, f"this release reads format {FORMAT}")
        return cls(contents)

    # --- for people ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return plan_text(self._contents)

    def __repr__(self) -> str:
        return f"<MemoryPlan for {len(self.blocks)} blocks within {self.limit_bytes} bytes>"

    def plot(self, file: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the step's time against the limit: what is predicted for plans and single strategies, and this plan.

        Args:
            file: where to write the picture; its suffix says the kind. None: nothing is written.

        Returns:
            The figure, of matplotlib.

        Raises:
            ConfigError: matplotlib is not installed, or the plan was loaded from a file, which has no prices.
            OSError: the file cannot be written.
        """
        if self._prices is None:
            raise ConfigError("plot", "a plan from a file", "it has no prices: draw the plan that plan_memory returns")
        figure = draw_plan(self._contents, self._prices)
        if file is not None:
            figure.savefig(file)
        return figure
