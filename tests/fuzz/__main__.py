"""`python -m tests.fuzz [TARGET ...] --minutes N`: every target under atheris, which is guided by coverage.

Each runs in processes of its own. What is found is written to `fuzz-findings/`, as the input that shows it, and fails
the command; `--repeat FILE` runs one again. `--keep` adds to `corpus/` what reached lines that nothing kept reaches:
the default test suite runs over that.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from inspect import CO_OPTIMIZED, getsourcefile
from pathlib import Path
from types import CodeType
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from tests.fuzz.bounds import counted_lines
from tests.fuzz.target import CORPUS, Target, check, kept_inputs, kept_inputs_as_text, warm
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "fuzz-findings"
MOST_SECONDS_FOR_ONE = 25
"""That an input may take before it counts as one that hangs: far beyond what any takes, on any machine."""
MOST_MEMORY_MIB = 1024
MOST_INPUT_BYTES = 4096
_MOST_KEPT_BYTES = 600


class Outcome(NamedTuple):
    """What became of a target.

    Attributes:
        num_runs: inputs that were run.
        num_edges: of the instrumented code that they reached, as libFuzzer counts.
        reached, missed: lines of the target's modules that its inputs reach, and those of the same functions that none
            does.
        findings: files with an input each that shows one.
        told: what the process said last, if it did not end well.
    """

    num_runs: int
    num_edges: int
    reached: int
    missed: list[str]
    findings: list[Path]
    told: str


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="TARGET", help=f"Of {', '.join(TARGETS)}.")] = None,
    minutes: Annotated[float, typer.Option(help="For all targets together.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of libFuzzer's choices.")] = 1,
    jobs: Annotated[int, typer.Option(help="Targets at once.")] = 2,
    keep: Annotated[bool, typer.Option(help="Add what reached something new to the kept inputs.")] = False,
    repeat: Annotated[Path | None, typer.Option(help="Run this one input through the one TARGET.")] = None,
) -> None:
    """Feed parsers what no sound peer, file or user would, guided by what it reaches."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    if unknown := set(names or ()) - set(TARGETS):
        raise typer.BadParameter(f"no target is called {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    chosen = [TARGETS[name] for name in names or TARGETS]
    if repeat is not None:
        for target in chosen:
            warm(target)
            check(target, repeat.read_bytes())
        return
    try:
        import atheris  # noqa: F401
    except ImportError:
        console.print("atheris is not installed: pip install -e '.[fuzz]'", markup=False)
        raise typer.Exit(2) from None
    seconds = max(1, round(minutes * 60 * jobs / len(chosen)))
    with ThreadPoolExecutor(jobs) as pool, console.status(f"{len(chosen)} targets, {seconds} s each"):
        outcomes = list(pool.map(lambda target: fuzz(target, seconds, seed, keep=keep), chosen))
    console.print(_table(chosen, outcomes))
    for target, outcome in zip(chosen, outcomes, strict=True):
        names = ", ".join(str(file.relative_to(ROOT)) for file in outcome.findings)
        if names or outcome.told:
            console.print(f"{target.name}: {names or 'no input'}\n{outcome.told}", style="red", markup=False)
    if any(outcome.findings or outcome.told for outcome in outcomes):
        raise typer.Exit(1)


def fuzz(target: Target, seconds: int, seed: int, *, keep: bool) -> Outcome:
    """Run it for so long, from its seeds and what is kept for it."""
    FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tierstore-fuzz-") as folder:
        inputs, words = Path(folder, "inputs"), Path(folder, "words")
        inputs.mkdir()
        for number, data in enumerate([*target.seeds(), *kept_inputs(target)]):
            (inputs / f"seed-{number}").write_bytes(data)
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words or (b"\0",)))  # none is an error
        prefix = FINDINGS / f"{target.name}-"
        before = set(FINDINGS.glob(f"{prefix.name}*"))
        command = [
            sys.executable, "-m", "tests.fuzz.process", target.name, str(inputs),
            f"-max_total_time={seconds}", f"-seed={seed}", f"-dict={words}", f"-artifact_prefix={prefix}",
            f"-timeout={MOST_SECONDS_FOR_ONE}", f"-rss_limit_mb={MOST_MEMORY_MIB}", f"-max_len={MOST_INPUT_BYTES}",
            "-print_final_stats=1",
        ]  # fmt: skip
        run = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, errors="replace", check=False
        )
        found = sorted(set(FINDINGS.glob(f"{prefix.name}*")) - before)
        collected = [file.read_bytes() for file in inputs.iterdir()]
    reached, missed = _account(target, collected if not found else kept_inputs(target), keep=keep and not found)
    said = run.stdout + run.stderr
    told = "" if run.returncode == 0 else _last_traceback(said)
    return Outcome(
        _last(r"number_of_executed_units:\s*(\d+)", said) or _last(r"#(\d+)", said),
        _last(r"cov: (\d+)", said),
        reached,
        missed,
        found,
        told,
    )


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _last(pattern: str, said: str) -> int:
    return int(([0, *re.findall(pattern, said)])[-1])


def _last_traceback(said: str) -> str:
    start = said.rfind("=== Uncaught Python exception: ===")
    if start < 0:
        return said[-1500:]
    return said[start : said.index("INFO:", start) if "INFO:" in said[start:] else None][:3000]


def _account(target: Target, inputs: list[bytes], *, keep: bool) -> tuple[int, list[str]]:
    """Lines of the target's modules that are reached, and that are not; with `keep`, the inputs that reach are kept."""
    kept = [*target.seeds(), *kept_inputs(target)]
    seen: set[tuple[str, int]] = set()
    chosen = []
    for data in [*kept, *sorted((each for each in inputs if len(each) <= _MOST_KEPT_BYTES), key=len)]:
        with counted_lines() as lines:
            target.run(data)
        if lines - seen and data not in kept:
            chosen.append(data)
        seen |= lines
    if keep and chosen:
        text = kept_inputs_as_text([*kept_inputs(target), *chosen])
        (CORPUS / f"{target.name}.txt").write_text(text, encoding="ascii")
    functions = [lines for module in target.modules for lines in _lines_of_functions(module)]
    every = set().union(*(lines for lines in functions if lines & seen))
    missed = sorted(f"{Path(file).stem}:{line}" for file, line in every - seen)
    return len(every & seen), missed


def _lines_of_functions(module: str) -> list[set[tuple[str, int]]]:
    """Of each function of a module: what runs at import is left out."""
    file = getsourcefile(importlib.import_module(module)) or ""
    top = compile(Path(file).read_text(encoding="utf-8"), file, "exec")

    def inner(code: CodeType) -> list[CodeType]:
        parts = [part for part in code.co_consts if isinstance(part, CodeType)]
        return [each for part in parts for each in (part, *inner(part))]

    functions = [code for code in inner(top) if code.co_flags & CO_OPTIMIZED]  # classes are not
    return [
        {(file, line) for *_, line in each.co_lines() if line and line != each.co_firstlineno} for each in functions
    ]


def _table(targets: list[Target], outcomes: list[Outcome]) -> Table:
    table = Table(title="fuzzing", title_justify="left")
    table.add_column("target")
    for name in ("runs", "edges", "lines reached", "findings"):
        table.add_column(name, justify="right")
    table.add_column("lines missed")
    for target, found in zip(targets, outcomes, strict=True):
        lines = f"{found.reached} of {found.reached + len(found.missed)}"
        missed = ", ".join(found.missed[:6]) + ("..." if len(found.missed) > 6 else "")
        table.add_row(target.name, f"{found.num_runs:,}", str(found.num_edges), lines, str(len(found.findings)), missed)
    return table


if __name__ == "__main__":
    typer.run(main)
