"""The demo: train a small language model twice, plainly and with the store, and compare the gradients.

Uses the store and its hooks as a program would; no other part imports it. Start reading at `compare.py`.
"""

from __future__ import annotations

from .compare import DemoFailedError, DemoResult, run_demo
from .settings import DemoSettings

__all__ = ["DemoFailedError", "DemoResult", "DemoSettings", "run_demo"]
