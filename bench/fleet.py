"""A host with eight accelerators and one to eight drives, and 64 such hosts: what limits a training step? Computed.

    python -m bench.fleet                    # the tables as Markdown on the screen, and the plot
    python -m bench.fleet --layers 8         # a shallower model, for a quick look

Nothing is measured, and no accelerator is needed; it is no part of `python -m bench`. The step is that of a published
model (`fleet_step.py`), the machines are those of `tierstore/tuning/machines`, with their sources. All ranks of a
host do the same at the same time, so one of them is simulated, on an equal share of the host (`fleet_plan.py`).
`fleet_limits.py` computes beside that how long each resource is busy in a step, also those that the simulator does
not have: the interpreter, and a daemon. With a deep model it takes some minutes of CPU time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

from tierstore.tuning.machines import find_machine

from .fleet_limits import cpu_costs
from .fleet_plan import Row, plan
from .fleet_report import AS_MEASURED, SPECIFIED, conclusions, draw, interpreters, table
from .fleet_step import EVERYTHING, INPUTS, MODEL, PRODUCTS

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Print the tables and draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=MODEL.layers, help="blocks of the model")
    parser.add_argument("--plot", type=Path, default=RESULTS / "fleet.png", help="where to draw")
    arguments = parser.parse_args()
    model = replace(MODEL, layers=arguments.layers)
    costs = cpu_costs(RESULTS / "amd_epyc")
    found: dict[tuple[str, str], list[Row]] = {}
    for kept, name in product((EVERYTHING, PRODUCTS), (SPECIFIED, AS_MEASURED)):
        found[kept, name] = plan(find_machine(name), kept, costs, model)
        print(f"\n### Saved: {kept}; {name}\n")
        print(table(found[kept, name]))
    checkpointed = plan(find_machine(SPECIFIED), INPUTS, costs, model, [1])[0]
    print("\n### Conclusions\n")
    print(conclusions(found, checkpointed, costs, model))
    print("\n### Shorter sequences\n")
    print(interpreters(costs, model))
    draw(found, checkpointed, arguments.plot)
    print(f"\nwrote {arguments.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
