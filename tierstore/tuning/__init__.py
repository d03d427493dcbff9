"""Settings for one program on one machine: recorded, searched in the simulator, and measured before they are believed.

Start reading at `tune.py`. `tune_loop` is for a training loop of one's own, `tierstore tune` for a program; the two
differ only in how a trial runs (`loop.py`, `program.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import tune_loop
    from .tuned import Tuned

__all__ = ["Tuned", "tune_loop"]


def __getattr__(name: str) -> Any:
    if name == "tune_loop":
        from .loop import tune_loop

        return tune_loop
    if name == "Tuned":
        from .tuned import Tuned

        return Tuned
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
