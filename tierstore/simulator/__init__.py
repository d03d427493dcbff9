"""The store in virtual time: predicts what a step costs on a drive, with other settings.

::

    from tierstore.simulator import Settings, simulate

    steps = simulate(workload, hardware, Settings(host_bytes=8 * 2**30))[0]
    print(steps[-1].seconds, steps[-1].stall_seconds)

Pure: no thread, no file, no torch. `from_trace` makes a workload from a recorded step. `from_hardware` makes hardware
from the file that `tierstore doctor --hardware` writes, and `fit` fits it to a real step.
"""

from .hardware import CodecSpeed, DepthSpeed, Drive, Hardware, Link
from .simulate import Settings, SimulatedStep, fit, simulate, steady_seconds
from .workload import Action, Compute, EndScope, LetGo, Pack, Release, Saved, Unpack, Workload

__all__ = [
    "Action",
    "CodecSpeed",
    "Compute",
    "DepthSpeed",
    "Drive",
    "EndScope",
    "Hardware",
    "LetGo",
    "Link",
    "Pack",
    "Release",
    "Saved",
    "Settings",
    "SimulatedStep",
    "Unpack",
    "Workload",
    "fit",
    "simulate",
    "steady_seconds",
]
