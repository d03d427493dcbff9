"""The store in virtual time: predicts what a step costs on a machine, with other settings.

`simulate` runs a `Workload` (`workload.py`; `from_trace.py` makes one from a recorded step) on `Hardware` with
`Settings`."""

from .hardware import CodecSpeed, Drive, Hardware
from .simulate import Settings, SimulatedStep, simulate
from .workload import Action, Compute, EndScope, LetGo, Pack, Release, Saved, Unpack, Workload

__all__ = [
    "Action",
    "CodecSpeed",
    "Compute",
    "Drive",
    "EndScope",
    "Hardware",
    "LetGo",
    "Pack",
    "Release",
    "Saved",
    "Settings",
    "SimulatedStep",
    "Unpack",
    "Workload",
    "simulate",
]
