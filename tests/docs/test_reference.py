"""The reference leaves nothing out: every key, error, exit code, field, metric and command."""

import importlib.util
import inspect
import re
from types import ModuleType

import pytest
import typer.main

import tierstore
from tests.docs.pages import DOCS, first_cells, section_of
from tierstore import StoreStats, TierStore, cli, errors, tiered_offload
from tierstore.base.config_file import OffloadTable, StoreTable
from tierstore.commands.serve import serve
from tierstore.daemon import report
from tierstore.daemon.metrics import metrics_text
from tierstore.daemon.report import DaemonReport

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


@pytest.mark.parametrize(("heading", "table"), [("### `[store]`", StoreTable), ("### `[offload]`", OffloadTable)])
def test_configuration_has_every_key_of_the_file(heading: str, table: type) -> None:
    keys = first_cells(section_of(REFERENCE / "configuration.md", heading))
    assert keys == list(table.__struct_fields__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("heading", "functions"),
    [("### `[store]`", [TierStore.connect, TierStore]), ("### `[offload]`", [tiered_offload])],
)
def test_configuration_has_the_defaults_of_the_code(heading: str, functions: list[object]) -> None:
    defaults = {
        name: parameter.default
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()  # type: ignore[arg-type]
    }
    shown = re.findall(r"^\| `(\w+)` \| `([^`]+)`(?: \||;)", section_of(REFERENCE / "configuration.md", heading), re.M)
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
    code = "".join(file.read_text(encoding="utf-8") for file in (root / "base").rglob("*.py"))
    code += "".join((root / file).read_text(encoding="utf-8") for file in ("store/trial.py", "disk/native.py"))
    named = set(re.findall(r'(?:environ(?:ment)?\.get\(|_?(?:VARIABLE|SWITCH) = )"([A-Z_]+)"', code))
    assert named == variables


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_page_has_every_class() -> None:
    page = REFERENCE / "errors.md"
    named = [name.split()[-1] for name in first_cells(section_of(page, "# Errors and exit codes"))]
    classes = [name for name in named if name.endswith(("Error", "Warning")) and name in errors.__all__]
    assert sorted(set(classes)) == sorted(errors.__all__)
    described = re.findall(r"^\.\. autoexception:: (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(described) == sorted(errors.__all__)


def test_errors_page_has_the_built_in_class_of_each_error() -> None:
    text = section_of(REFERENCE / "errors.md", "# Errors and exit codes")
    for name in errors.__all__:
        (row,) = re.findall(rf"^\| `{name}`(.*?) \|", text, re.MULTILINE)
        own = getattr(errors, name)
        built_in = [base.__name__ for base in own.__bases__ if base.__module__ == "builtins" and base is not Exception]
        assert re.findall(r"`(\w+)`", row) == built_in, name


def test_errors_page_has_the_exit_codes_of_every_command() -> None:
    named = first_cells(section_of(REFERENCE / "errors.md", "## Exit codes"))
    assert sorted(named) == sorted(commands())


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


def test_docstring_of_the_statistics_has_every_field() -> None:
    assert StoreStats.__doc__ is not None
    documented = re.findall(r"^ {8}(\w+): ", StoreStats.__doc__, re.MULTILINE)
    assert documented == [name for name in StoreStats.__dataclass_fields__ if name in documented]
    assert set(documented) == set(StoreStats.__dataclass_fields__)


def test_docstrings_of_the_report_have_every_field() -> None:
    for kind in (report.DaemonReport, report.SessionState, report.Totals, report.JobTimes, report.Spread):
        assert kind.__doc__ is not None
        documented = re.findall(r"^ {8}([\w, ]+): ", kind.__doc__, re.MULTILINE)
        assert {name for names in documented for name in names.split(", ")} == set(kind.__struct_fields__), kind


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


def test_made_page_of_commands_has_every_command_and_option(made_pages: ModuleType) -> None:
    page = made_pages.fill_in((REFERENCE / "cli.md").read_text(encoding="utf-8"))
    for name, command in commands().items():
        (text,) = re.findall(rf"^#+ `{name}`$(.*?)(?=^#+ `|\Z)", page, re.MULTILINE | re.DOTALL)
        for parameter in command.params:  # type: ignore[attr-defined]
            assert parameter.opts[0] in text or (parameter.metavar or parameter.name) in text, (name, parameter.name)
    assert not re.search(r"(?<![`-])--[a-z]", re.sub(r"`[^`\n]+`", "", page)), "outside of code it becomes a dash"
