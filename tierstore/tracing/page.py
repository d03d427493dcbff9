"""Steps as a page of HTML that needs no network and no other file. `page.html` draws the data put into it here.

Texts of a trace (names of threads, reasons of failures) get into it as JSON without "<", and plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from ..plain_text import plain, plain_json
from .causes import CAUSES
from .events import Header, StoreSettings
from .steps import Step
from .summary import summarize
from .timeline import TIERS, curves_of, lanes_of


def page_of(steps: Sequence[Step], header: Header, names: Mapping[int, str], num_steps: int, *, first: int) -> str:
    """Return the page. Its times are milliseconds from each step's beginning. `steps`: those that a reader may choose
    from, of `num_steps` in the trace; number `first` is shown first. `names`: of threads."""
    drawn = [_data(step, header, names) for step in steps]
    data = {"causes": CAUSES, "first": first, "numSteps": num_steps, "steps": drawn}
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    as_json = plain_json(msgspec.json.encode(data).decode()).replace("<", "\\u003c")
    return page.replace("<!--TITLE-->", f"Step {first} of {num_steps}").replace("<!--DATA-->", as_json)


def _data(step: Step, header: Header, names: Mapping[int, str]) -> dict[str, Any]:
    summary = summarize(step, header)

    def ms(at_ns: int) -> float:
        return round((at_ns - step.began_ns) / 1e6, 4)

    return {
        "number": step.number,
        "duration": ms(step.ended_ns),
        "waited": summary.waited_seconds,
        "headline": [plain(line) for line in summary.headline],
        "memory": summary.memory,
        "verdict": summary.why_memory_stays,
        "summary": summary,
        "lanes": [
            {
                "group": lane.group,
                "name": plain(lane.name),
                "boxes": [[ms(box.began_ns), ms(box.ended_ns), box.kind, plain(box.text)] for box in lane.boxes],
            }
            for lane in lanes_of(step, names)
        ],
        "curves": [
            {"field": field, "name": TIERS[field], "points": [[ms(at_ns), nbytes] for at_ns, nbytes in points]}
            for field, points in curves_of(step).items()
        ],
        "limits": _limits(step, header.store),
    }


def _limits(step: Step, store: StoreSettings) -> list[dict[str, Any]]:
    """The budgets but those of 0 bytes: each the most that this tier may hold, together with those of its chart that
    lie below it."""
    budgets = [
        ("device_bytes", "device_bytes", 0 if step.scope is None else step.scope.device_bytes),
        ("host_bytes", "host_bytes", store.host_bytes),
        ("staging_bytes", "host_bytes + staging_bytes", store.host_bytes + store.staging_bytes),
        ("disk_bytes", "disk_bytes", store.disk_bytes),
    ]
    return [{"field": field, "name": name, "nbytes": nbytes} for field, name, nbytes in budgets if nbytes > 0]
