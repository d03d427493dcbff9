"""Finds settings for a machine (`examine.py` measures it, `findings.py` says what is wrong, `report.py` what to set) or
a program (start at `tune.py`; `tune_loop` tunes a loop in this process, `program.py` a program)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import tune_loop
    from .settings import TrialSettings
    from .tuned import Tuned

__all__ = ["TrialSettings", "Tuned", "tune_loop"]

_HOMES = {"TrialSettings": ".settings", "Tuned": ".tuned", "tune_loop": ".loop"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
