"""The reference leaves nothing out: every key, error, exit code, field, metric and command."""

import importlib.util
import inspect
import re
from types import ModuleType
from typing import Any

import pytest
import typer.main

import tierstore
from tests.docs.pages import DOCS, first_cells, section_of
from tierstore import MemoryPlan, StoreStats, TierStore, cli, tiered_offload
from tierstore.base.config_file import OffloadTable, StoreTable
from tierstore.commands.serve import serve
from tierstore.daemon import report
from tierstore.daemon.metrics import metrics_text
from tierstore.daemon.report import DaemonReport
from tierstore.disk import file_layout
from tierstore.memory_plan import contents
from tierstore.sidecar import messages
from tierstore.tracing import events
from tierstore.tuning.report import REPORT_VERSION

REFERENCE = DOCS / "reference"


def commands() -> dict[str, object]:
    top = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    found = {f"tierstore {name}": command for name, command in top.items()}
    for name, group in list(found.items()):
        if hasattr(group, "commands"):
            del found[name]
            found |= {f"{name} {each}": command for each, command in group.commands.items()}
    return found


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heading", "table", "functions"),
    [
        ("### `[store]`", StoreTable, [TierStore.connect, TierStore]),
        ("### `[offload]`", OffloadTable, [tiered_offload]),
    ],
)
def test_configuration_has_every_key_of_the_file_with_the_defaults_of_the_code(
    heading: str, table: Any, functions: list[Any]
) -> None:
    section = section_of(REFERENCE / "configuration.md", heading)
    assert first_cells(section) == list(table.__struct_fields__)
    parameters = [each for function in functions for each in inspect.signature(function).parameters.values()]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    shown = re.findall(r"^\| `(\w+)` \| `([^`]+)`(?: \||;)", section, re.M)
    assert len(shown) > 1
    for key, text in shown:
        if key != "staging_bytes":  # None stands for two defaults, one for each kind of store
            assert text.lower().replace('"', "'") == repr(defaults[key]).lower(), key


def test_configuration_has_every_option_of_the_daemon() -> None:
    options = first_cells(section_of(REFERENCE / "configuration.md", "## The daemon"))
    flags = [option.split()[0] for option in options]
    assert flags == [f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters]


def test_configuration_has_every_variable_that_the_code_reads() -> None:
    variables = set(first_cells(section_of(REFERENCE / "configuration.md", "## Environment of a training")))
    root = DOCS.parent / "tierstore"
    code = "".join(file.read_text(encoding="utf-8") for file in root.rglob("*.py"))
    named = set(re.findall(r'(?:environ(?:ment)?\.get\(|_?(?:VARIABLE|SWITCH|CGROUPS) = )"([A-Z_]+)"', code))
    of_others = {"CUDA_LAUNCH_BLOCKING", "LD_PRELOAD", "XDG_CACHE_HOME"}  # which mean to tierstore what they always do
    assert named - of_others == variables


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS = sorted(name for name in tierstore.__all__ if name.endswith(("Error", "Warning")))


def test_errors_page_has_every_class_with_its_built_in_one_and_the_exit_codes_of_every_command() -> None:
    page = REFERENCE / "errors.md"
    text = section_of(page, "# Errors and exit codes")
    named = {name.split()[-1] for name in first_cells(text)}
    assert {name for name in named if name.endswith(("Error", "Warning"))} >= set(ERRORS)
    described = re.findall(r"^\.\. autoexception:: (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(described) == ERRORS
    for name in ERRORS:
        (row,) = re.findall(rf"^\| `{name}`(.*?) \|", text, re.MULTILINE)
        bases = getattr(tierstore, name).__bases__
        built_in = [base.__name__ for base in bases if base.__module__ == "builtins" and base is not Exception]
        assert re.findall(r"`(\w+)`", row) == built_in, name
    assert sorted(first_cells(section_of(page, "## Exit codes"))) == sorted(commands())


# --- what is made of the program --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_pages() -> ModuleType:
    """What `docs/conf.py` has pages filled in by."""
    spec = importlib.util.spec_from_file_location("made_pages", DOCS / "made_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_page_has_every_public_name() -> None:
    pages = "".join((REFERENCE / name).read_text(encoding="utf-8") for name in ("api.md", "errors.md", "stats.md"))
    named = {name.rpartition(".")[2] for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", pages, re.MULTILINE)}
    assert set(tierstore.__all__) <= named
    for file in (DOCS.parent / "tierstore" / "integrations").glob("*.py"):
        names = re.findall(r"^__all__ = \[(.*?)\]", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        public = {name for each in names for name in re.findall(r'"(\w+)"', each)} - {"Where"}  # a type of arguments
        assert public <= named, file


@pytest.mark.parametrize("kind", [TierStore, tiered_offload, MemoryPlan, StoreStats])
def test_pages_have_every_public_method(kind: type) -> None:
    text = "".join((REFERENCE / name).read_text(encoding="utf-8") for name in ("api.md", "stats.md"))
    (listed,) = re.findall(rf"^\.\. autoclass:: {kind.__name__}(?:\(\))?\n   :members: (.+)$", text, re.MULTILINE)
    public = {name for name, value in vars(kind).items() if callable(value) or isinstance(value, classmethod)}
    assert set(listed.split(", ")) - {"__call__"} == {name for name in public if not name.startswith("_")}


def test_formats_have_the_versions_of_the_code() -> None:
    section = section_of(REFERENCE / "stability.md", "# What is stable")
    versions = [int(version) for version in re.findall(r"^\| [^|]+ \| (\d+) \|", section, re.MULTILINE)]
    assert versions == [messages.VERSION, file_layout._FORMAT_VERSION, events.VERSION, contents.FORMAT, REPORT_VERSION]


def test_monitoring_names_every_logger() -> None:
    folders = [DOCS.parent / name for name in ("tierstore", "daemon", "hooks")]
    code = "".join(file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*.py"))
    loggers = set(re.findall(r'getLogger\("?([\w.]+)"?\)', code))
    named = section_of(DOCS / "how_to" / "monitoring.md", "## Warnings and logs")
    assert loggers == set(re.findall(r"`(tierstore\.\w+)`", named))


def test_notebook_is_on_the_site_with_its_outputs(made_pages: ModuleType) -> None:
    page = made_pages.fill_in((DOCS / "how_to" / "notebook.md").read_text(encoding="utf-8"))
    assert "tiered_offload(store):" in page
    assert "KeyboardInterrupt" in page
    assert "the same bits: True" in page
    assert len(re.findall(r"^# ", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)) == 1


def test_docstrings_of_statistics_and_report_have_every_field() -> None:
    kinds = (report.DaemonReport, report.SessionState, report.Totals, report.JobTimes, report.Spread)
    fields = {StoreStats: StoreStats.__dataclass_fields__} | {kind: kind.__struct_fields__ for kind in kinds}
    for kind, names in fields.items():
        documented = re.findall(r"^ {8}(\w[\w, ]*): ", kind.__doc__ or "", re.MULTILINE)
        assert [name for each in documented for name in each.split(", ")] == list(names), kind


def test_made_table_of_metrics_has_every_one(made_pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    served = set()

    def spy(report: DaemonReport) -> bytes:
        text = metrics_text(report)
        served.update(re.findall(r"^# TYPE (tierstore_\w+) ", text.decode(), re.MULTILINE))
        return text

    monkeypatch.setattr(made_pages, "metrics_text", spy)
    page = made_pages.fill_in((REFERENCE / "stats.md").read_text(encoding="utf-8"))
    named = set(re.findall(r"^\| `(tierstore_\w+)` \|", page, re.MULTILINE))
    assert named == served
    assert {"tierstore_write_allowance_bytes", "tierstore_queued_quota_bytes"} <= named, (
        "only served if there is a limit"
    )
    code = (DOCS.parent / "daemon" / "metrics.py").read_text(encoding="utf-8")
    whole_names = set(re.findall(r'"(tierstore_\w+)"', code))
    assert {name for name in whole_names if not any(each.startswith(name) for each in named)} == set()
