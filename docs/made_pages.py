"""Parts of pages that are made when the site is built: from the program, and from files of the repository's root."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tierstore.daemon.metrics import metrics_text
from tierstore.daemon.report import DaemonReport, Spread

__all__ = ["commands", "fill_in", "metrics", "notebook", "with_included", "with_links_to_files"]


def fill_in(page: str) -> str:
    """The page, with each mark such as `<!-- made of the program: commands -->` replaced by what it names."""
    return re.sub(r"<!-- made of the program: (\w+) -->", lambda mark: _PARTS[mark[1]](), page)


def commands() -> str:
    """Every command with its arguments and options, as headings from the second level on."""
    line = [sys.executable, "-m", "typer", "tierstore.cli", "utils", "docs", "--name", "tierstore"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    without_list = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", done.stdout)  # its descriptions are cut short
    as_code = re.compile(r"(^```.*|`[^`\n]+`)|(--[a-z][\w-]*)", re.MULTILINE)  # options that are not code yet
    with_code = as_code.sub(lambda found: found[1] or f"`{found[2]}`", without_list)
    return re.sub(r"^#", "##", with_code, flags=re.MULTILINE)


def metrics() -> str:
    """A table of the daemon's metrics, with a row for each."""
    report = msgspec.convert(_made_up(msgspec.inspect.type_info(DaemonReport)), DaemonReport)
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in text_string_to_metric_families(metrics_text(report).decode()):
        if not metric.name.startswith("tierstore_"):  # the kernel's figures of the process
            continue
        labels = " ".join(f"`{label}`" for label in _labels_of(metric)) or "-"
        rows.append(f"| `{_full_name(metric)}` | {metric.type} | {labels} | {metric.documentation} |")
    return "\n".join(rows)


def notebook() -> str:
    """The cells of examples/notebook.ipynb with their outputs, as headings from the second level on."""
    file = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"^#(?!#)", "##", source))
            continue
        parts.append(f"```python\n{source}\n```")
        outputs = ["".join(each.get("text", each.get("traceback", ()))).rstrip() for each in cell["outputs"]]
        parts += [f"```text\n{output}\n```" for output in outputs]
    return "\n\n".join(parts)


_PARTS: Mapping[str, Callable[[], str]] = {"commands": commands, "metrics": metrics, "notebook": notebook}


def _full_name(metric: Metric) -> str:
    """The name under which Prometheus finds it; a histogram has three, which begin with this."""
    return metric.name + ("_total" if metric.type == "counter" else "")


def _labels_of(metric: Metric) -> list[str]:
    own = {"le"} if metric.type == "histogram" else set()
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels)
    return [label for label in labels if label not in own]


def _made_up(kind: Any) -> Any:
    """A value of a type, as plain as it can be, without a None and without an empty list."""
    inspect = msgspec.inspect
    match kind:
        case inspect.StructType(cls=cls) if cls is Spread:
            return {"bounds": [], "counts": [0], "total": 0.0}
        case inspect.StructType() | inspect.DataclassType():
            return {field.encode_name: _made_up(field.type) for field in kind.fields}
        case inspect.UnionType():
            return _made_up(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
        case inspect.ListType():
            return [_made_up(kind.item_type)]
        case inspect.VarTupleType():
            return []
        case inspect.DictType():
            return {"": _made_up(kind.value_type)}
    return {inspect.IntType: 1, inspect.FloatType: 1.0, inspect.BoolType: True, inspect.StrType: ""}[type(kind)]


# --- files outside of the documentation ---------------------------------------------------------------------------

_LINK = re.compile(r"\[([^]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_INCLUDE = re.compile(r"^```\{include\} (\S+\.md)\n```$", re.MULTILINE)


def with_included(page: str, folder: Path) -> str:
    """The page with the text of each page that it includes, whose links lead from `folder` then."""

    def text_of(include: re.Match[str]) -> str:
        file = folder / include[1]

        def led(link: re.Match[str]) -> str:
            if not (file.parent / link[2]).exists():
                return link[0]
            return f"[{link[1]}]({os.path.relpath(file.parent / link[2], folder)}{link[3] or ''})"

        return _LINK.sub(led, file.read_text(encoding="utf-8"))

    return _INCLUDE.sub(text_of, page)


def with_links_to_files(page: str, folder: Path, docs: Path) -> str:
    """The page with links that a site can have: pages outside of it become downloads, folders their names alone.

    A page of the root that a page of the site includes is linked to there.
    """
    homes = {
        (home.parent / include).resolve(): home
        for home in (docs / "project").glob("*.md")
        for include in _INCLUDE.findall(home.read_text(encoding="utf-8"))
    }

    def led(link: re.Match[str]) -> str:
        place = (folder / link[2]).resolve()
        if place in homes:
            return f"[{link[1]}]({os.path.relpath(homes[place], folder)}{link[3] or ''})"
        if docs in place.parents or not place.exists():
            return link[0]
        if place.is_dir():
            return link[1]
        return f"[{link[1]}](<path:{link[2]}>)" if place.suffix == ".md" else link[0]

    return _LINK.sub(led, page)
