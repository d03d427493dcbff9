"""`python -m tests.fuzz [TARGET ...] --minutes N`: every target under atheris, which is guided by coverage.

Each runs in processes of its own. What is found is written to `fuzz-findings/`, as the input that shows it, and fails
the command; `--repeat FILE` runs one again. As a line of `corpus/TARGET.txt` the default test suite runs it too.
"""

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tests.fuzz.target import Target, check, seeds_and_kept, warm
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "fuzz-findings"
MOST_SECONDS_FOR_ONE = 25
"""That an input may take before it counts as one that hangs: far beyond what any takes, on any machine."""
MOST_MEMORY_MIB = 1024
MOST_INPUT_BYTES = 4096


class Outcome(NamedTuple):
    """Of a target: inputs run, edges reached, files that show a finding each, and its last words if it ended badly."""

    num_runs: int
    num_edges: int
    findings: list[Path]
    told: str


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="TARGET", help=f"Of {', '.join(TARGETS)}.")] = None,
    minutes: Annotated[float, typer.Option(help="For all targets together.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of libFuzzer's choices.")] = 1,
    jobs: Annotated[int, typer.Option(help="Targets at once.")] = 2,
    repeat: Annotated[Path | None, typer.Option(help="Run this one input through the one TARGET.")] = None,
) -> None:
    """Feed parsers what no sound peer, file or user would, guided by what it reaches."""
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
        print("atheris is not installed: pip install -e '.[fuzz]'")
        raise typer.Exit(2) from None
    seconds = max(1, round(minutes * 60 * jobs / len(chosen)))
    print(f"{len(chosen)} targets, {seconds} s each", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda target: fuzz(target, seconds, seed), chosen))
    for target, found in zip(chosen, outcomes, strict=True):
        files = ", ".join(str(file.relative_to(ROOT)) for file in found.findings)
        print(f"{target.name}: {found.num_runs:,} runs, {found.num_edges} edges, findings: {files or 'none'}")
        if found.told:
            print(found.told)
    if any(outcome.findings or outcome.told for outcome in outcomes):
        raise typer.Exit(1)


def fuzz(target: Target, seconds: int, seed: int) -> Outcome:
    """Run it for so long, from its seeds and what is kept for it."""
    FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tierstore-fuzz-") as folder:
        inputs, words = Path(folder, "inputs"), Path(folder, "words")
        inputs.mkdir()
        for number, data in enumerate(seeds_and_kept(target)):
            (inputs / f"seed-{number}").write_bytes(data)
        escaped = ["".join(f"\\x{byte:02x}" for byte in word) for word in target.words or (b"\0",)]  # none is an error
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        prefix = FINDINGS / f"{target.name}-"
        before = set(FINDINGS.glob(f"{prefix.name}*"))
        command = [
            sys.executable, "-m", "tests.fuzz.process", target.name, str(inputs),
            f"-max_total_time={seconds}", f"-seed={seed}", f"-dict={words}", f"-artifact_prefix={prefix}",
            f"-timeout={MOST_SECONDS_FOR_ONE}", f"-rss_limit_mb={MOST_MEMORY_MIB}", f"-max_len={MOST_INPUT_BYTES}",
            "-print_final_stats=1",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    said = run.stdout + run.stderr
    findings = sorted(set(FINDINGS.glob(f"{prefix.name}*")) - before)
    num_runs = _last(r"number_of_executed_units:\s*(\d+)", said) or _last(r"#(\d+)", said)
    return Outcome(num_runs, _last(r"cov: (\d+)", said), findings, _last_traceback(said) if run.returncode else "")


def _last(pattern: str, said: str) -> int:
    return int(([0, *re.findall(pattern, said)])[-1])


def _last_traceback(said: str) -> str:
    _, _, after = said.rpartition("=== Uncaught Python exception: ===")
    return after.partition("INFO:")[0][:3000] if after != said else said[-1500:]


if __name__ == "__main__":
    typer.run(main)
