"""Predicts with the simulator how long a recorded step takes on other hardware, and what it costs there.

::

    from pathlib import Path

    from tierstore.planning import Use, answer, find_machine, last_whole_step, planned_settings
    from tierstore.simulator.from_trace import workload_of
    from tierstore.tracing.reader import read_trace

    trace = read_trace(Path("step.jsonl"))
    step = last_whole_step(trace, "step.jsonl")
    settings = planned_settings(trace, step)
    found = answer(workload_of(trace, step), find_machine("sata"), settings, num_ranks=4, use=Use(num_hosts=8))

Nothing here imports torch or the command line. The only files read are those of hardware and settings.
"""

from __future__ import annotations

from .answers import Answer, answer
from .costs import Costs, Use, costs_of
from .drawn import simulated_trace
from .machines import Machine, find_machine, shipped_machines
from .prediction import Limit, Misfit, Prediction, predict
from .settings import last_whole_step, planned_settings, warnings_of

__all__ = [
    "Answer",
    "Costs",
    "Limit",
    "Machine",
    "Misfit",
    "Prediction",
    "Use",
    "answer",
    "costs_of",
    "find_machine",
    "last_whole_step",
    "planned_settings",
    "predict",
    "shipped_machines",
    "simulated_trace",
    "warnings_of",
]
