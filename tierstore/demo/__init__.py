"""The demo: train a small language model twice, plainly and with the store, and compare the gradients
(`compare.py`)."""

from __future__ import annotations

from .compare import DemoResult, run_demo
from .settings import DemoSettings

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
