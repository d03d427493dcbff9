"""The logs that are alive, each found by its number, by which operators of a traced graph refer to it (`traced.py`).

The list keeps no log alive; the saved tensors of a log do.

NOTE [Layouts for traces]
Whatever the tracing of a backward looks at becomes a condition of its graph: where it differs the next time, backward
is traced again, and after some times not at all. So tracing may not look at what depends on budgets and on time:
whether a tensor is tracked or registered. It looks at the layout alone, which all registered tensors have. Tracked ones
have none, since that would cost a twentieth of each pack. The first backward that is traced in a process changes that:
it gives one to each tracked tensor that there is, and from then on each pack gives one to its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tierstore.base.remains import Remains
from tierstore.ledger.log import GraphLog
from tierstore.residency.tracked import TrackedLog
from tierstore.tensors.layout import layout_of
from tierstore.tensors.uncompiled import let_errors_through


class _Enlisted(Remains[TrackedLog]):
    """A weak reference to a log, which still knows the number when the log is gone."""

    __slots__ = ("number",)

    def __init__(self, log: TrackedLog, note_death: Callable[[_Enlisted], None]) -> None:
        self.number = log.number


_living: dict[int, _Enlisted] = {}
_all_laid_out = False
_dead: deque[_Enlisted] = deque()  # still in the list: nothing may be done as a log dies, see `remains.py`


def enlist(log: TrackedLog) -> None:
    """Add a new log to the list, and strike out those that have died."""
    _living[log.number] = _Enlisted(log, _dead.append)
    try:
        while True:
            del _living[_dead.popleft().number]
    except IndexError:
        pass  # no more


def living_log(number: int) -> Any:
    """The `PackLog` of that number. It lives: a traced graph keeps its saved tensors, and they keep their log."""
    log = _living[number]()
    if log is None:
        raise RuntimeError(f"log {number} is gone")
    return log


def keep_layouts(_: object) -> None:
    """From now on, tracked tensors have a layout: see NOTE [Layouts for traces]. Called while a backward is traced."""
    global _all_laid_out
    if not _all_laid_out:
        let_errors_through()
        GraphLog.keeps_layouts = True  # first: a pack that has not seen it yet is found below
        for enlisted in list(_living.values()):
            log: Any = enlisted()
            if log is not None:
                log.residency.saving.settle()  # from now on no pack is without an index: NOTE [Grants] in `grants.py`
            for tracked in () if log is None else log.unregistered():
                alias = tracked.alias
                if alias is not None:
                    tracked.layout = layout_of(alias)
        _all_laid_out = True
