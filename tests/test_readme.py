"""The program and the commands of README.md run as they stand there, and print what they promise."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.training_step import HOST_BYTES
from bench.trainings import readme_training
from tests.docs.pages import ROOT, Block, blocks_of, commands_of, section_of
from tests.docs.test_tutorial import install_quickly

SMALL = " --device=cpu --steps=2 --layers=2 --width=64 --context=128 --batch=4"


def program() -> str:
    """The first example of the page."""
    return re.findall(
        r"^```python\n(.+?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )[0]


def consoles() -> list[Block]:
    """The commands of the page: the two that try it, and those that install it."""
    return [block for block in blocks_of(ROOT / "README.md") if block.language == "console"]


def test_first_block_is_the_two_commands_and_make_knows_them() -> None:
    first, _ = consoles()
    assert next(iter(blocks_of(ROOT / "README.md"))) == first
    typed = [command.partition("  #")[0].strip() for command, _ in commands_of(first.code)]
    assert typed == ["make demo", "make test"]
    for command, runs in zip(typed, ("tierstore demo", "-m pytest"), strict=True):
        dry = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert runs in dry.stdout


def test_ten_lines_are_ten() -> None:
    lines = [line for line in program().splitlines() if line.strip()]
    assert len(lines) - sum(line.startswith(("import", "from")) for line in lines) <= 10


def test_ten_lines_print_what_was_stored_and_the_peak(store_directory: Path) -> None:
    small = program().replace("(16, 512, 256)", "(4, 512, 256)").replace("128MiB", "8MiB")
    assert small.count("(4, 512, 256)") == small.count("8MiB") == 1
    done = subprocess.run(
        [sys.executable, "-c", small], cwd=store_directory, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    stored, peaks = done.stdout.splitlines()
    assert "written to disk" in stored
    beside = re.fullmatch(r"peak: (\d+) MiB \(plain: (\d+) MiB\)", peaks)
    assert beside
    assert 0 < int(beside[1]) < int(beside[2]), "plain's peak beside its own"
    assert list(store_directory.iterdir()) == [], "a folder of its own, which goes"


def test_ten_lines_are_the_workload_of_the_table_and_of_the_picture() -> None:
    """Their model, batch and loss are those that `training_step` and `step_memory` measure."""
    measured = inspect.getsource(readme_training).replace("nn.", "torch.nn.")
    lines = [line.strip() for line in program().splitlines()]
    for begin in ("options = ", "layers = ", "model, batch = "):
        (line,) = [line for line in lines if line.startswith(begin)]
        assert line in measured
    assert "model(batch).square().mean()" in measured
    assert 'host_bytes="128MiB"' in program()
    assert HOST_BYTES == 128 * 2**20


def test_lines_for_trainers_are_those_of_their_page_which_run() -> None:
    """`tests/integrations` runs the recipes of that page."""
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/how_to/trainers.md"))
    imported, called = readme.split("```python\n")[2].split("```")[0].strip().split("\n\n")
    assert imported in page
    assert called.replace('"/nvme")', "path, ").partition("  #")[0] in page
    assert "TierStoreCallback(path, " in page


# --- figures ----------------------------------------------------------------------------------------------------------

FIGURE = re.compile("(?P<ratio>\N{MULTIPLICATION SIGN})?(?P<amount>[\\d.]+)(?(ratio)| (?P<unit>s|MiB|GiB)\\b)")
UNITS = {"MiB": 2**20, "GiB": 2**30}
KINDS = {"s": ("step_seconds",)} | dict.fromkeys(UNITS, ("peak_memory_bytes", "peak_bytes", "limit_bytes"))


def measured_parts() -> Iterator[str]:
    """What tells measurements: the bullets at the top, and each paragraph on costs with the table below it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    top, costs = text.partition("**Status**")[0], section_of(ROOT / "README.md", "## What it costs")
    yield from top.split("\n* ")[1:]
    yield from re.split(r"\n\n(?!\|)", costs.partition("\n\nA GPU makes")[0].strip())


def claims_of(part: str) -> Iterator[list[re.Match[str]]]:
    """Figures of one measurement: in a row of a table up to each peak; elsewhere each by itself."""
    for line in part.splitlines():
        name, row = line.split("|", 2)[1:] if line.startswith("|") else (line, "")
        yield from ([figure] for figure in FIGURE.finditer(name))
        claim: list[re.Match[str]] = []
        for figure in FIGURE.finditer(row):
            claim.append(figure)
            if figure["unit"] in UNITS:
                yield claim
                claim = []
        assert not claim, line


def measurements_in(file: Path) -> list[list[tuple[str, float]]]:
    """The named numbers of each measurement. In a file of GPUs ratios of steps are left to the reader."""

    def below(tree: object, name: str = "") -> Iterator[tuple[str, float]]:
        for key, each in tree.items() if isinstance(tree, dict) else ():
            yield from below(each, key)
        if isinstance(tree, (int, float)):
            yield name, tree

    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [list(below(json.loads(line))) for line in text.splitlines()]
    runs = [list(below(run)) for run in json.loads(text)["runs"]]
    steps = [number for run in runs for name, number in run if name == "step_seconds"]
    return [*runs, [("step_of_plain", each / other) for each in steps for other in steps]]


def is_measured(figure: re.Match[str], numbers: list[tuple[str, float]]) -> bool:
    """Whether a number of that kind is this one when it is rounded as here."""
    kinds = ("step_of_plain",) if figure["ratio"] else KINDS[figure["unit"]]
    decimals, unit = len(figure["amount"].partition(".")[2]), UNITS.get(figure["unit"], 1)
    return any(name in kinds and f"{number / unit:.{decimals}f}" == figure["amount"] for name, number in numbers)


def test_figures_are_in_the_files_of_results_that_stand_beside_them() -> None:
    num_figures = 0
    for part in measured_parts():
        files = re.findall(r"\]\((bench/results/[^)]+\.jsonl?)\)", part)
        measured = [each for file in files for each in measurements_in(ROOT / file)]
        for claim in claims_of(part):
            num_figures += len(claim)
            found = any(all(is_measured(figure, numbers) for figure in claim) for numbers in measured)
            assert found, f"{[figure[0] for figure in claim]} in none of {files}"
    assert num_figures > 40
    assert "6 GiB for 24 layers, 1024 wide, with 131k tokens" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert 24 * 131_072 * 1024 * 2 == 6 * 2**30


def test_plain_peak_in_the_ten_lines_is_that_of_the_table() -> None:
    (peak,) = re.findall(r"\(plain: (\d+ MiB)\)", program())
    assert re.search(rf"(?m)^\| plain \|.*\| {peak} \|$", section_of(ROOT / "README.md", "## What it costs"))


@pytest.mark.slow
def test_five_commands_install_and_show_it(tmp_path: Path) -> None:
    """But for the two that ask a package index: `python -m tests.release` installs a release."""
    _, console = consoles()
    typed = [command.partition("  #")[0].strip() for command, _ in commands_of(console.code)]
    clone, environment, torch, install, demo = typed
    assert torch.startswith("pip install torch --index-url https://")
    assert (install, demo) == ("pip install . ./native", "tierstore demo")
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("there is no repository to clone")

    def types(folder: Path, *lines: str) -> None:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=folder, env=variables, check=True, timeout=120)

    types(tmp_path, clone.replace("ADDRESS", str(ROOT)), environment.replace("-m venv", "-m venv --without-pip"))
    source = tmp_path / "tierstore"
    install_quickly(source / ".venv", source)
    types(source, environment.partition(" && ")[2], demo + SMALL)
