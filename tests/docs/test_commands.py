"""Commands on the pages work: they are typed into a shell, those of a page one after the other.

Daemons of a page (`tierstore serve`) run until the end of the page. What measures, tunes or watches for long is made
short by options that the page does not have. The exceptions: pages in `ELSEWHERE`, and blocks with a line before them
that begins with `NOT_RUN` or `LONG` and says why.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.command_line import record_two_steps
from tests.daemon.conftest import END_SECONDS, READY_SECONDS, environment_of_tests
from tests.docs.pages import ALL_PAGES, ROOT, Block, blocks_of, commands_of
from tests.docs.test_snippets import SAVED, is_run_elsewhere, name_of

ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "CONTRIBUTING.md": "tests/test_makefile.py",
    "docs/tutorial/first_training.md": "tests/docs/test_tutorial.py",
    "docs/tutorial/reading_a_trace.md": "tests/docs/test_tutorial.py",
    "examples/README.md": "tests/examples/test_examples.py",
}
"""Pages whose commands other tests run, or name what `make` does."""

LONG = "*Run by `pytest -m many` alone:"

SHORT = {
    "tierstore doctor": "--seconds 1",
    "tierstore tune": "--steps 1 --rounds 3 --candidates 1",
    "tierstore top": "--iterations 2",
}

PROGRAM = """
import torch
from tierstore import TierStore, tiered_offload

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
with TierStore("/nvme") as store:
    for _ in range(100):
        with tiered_offload(store, min_bytes=0):
            loss = model(torch.randn(512, 256)).square().mean()
        loss.backward()
"""
"""What the pages call train.py, unless they have the reader save one."""


def consoles_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in ("console", "bash", "sh", "shell")]


CONSOLES = {page: blocks for page in ALL_PAGES if (blocks := consoles_of(page))}
TYPED = {
    page: [command for block in own for command, _ in commands_of(block.code)]
    for page, blocks in CONSOLES.items()
    if name_of(page) not in ELSEWHERE
    if (own := [block for block in blocks if not is_run_elsewhere(block)])
}


class Terminal:
    """A shell in a folder that has what the pages take for granted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "t.sock"
        programs = folder / "bin"
        programs.mkdir()
        for name, line in {
            "tierstore": "-m tierstore.cli",
            "python": "",
            "torchrun": "-m torch.distributed.run",
        }.items():
            programs.joinpath(name).write_text(f'#!/bin/sh\nexec {sys.executable} {line} "$@"\n', encoding="utf-8")
            programs.joinpath(name).chmod(0o755)
        folder.joinpath("nvme").mkdir()
        folder.joinpath("train.py").write_text(self._placed(PROGRAM), encoding="utf-8")
        (folder / "recorded").mkdir()
        record_two_steps(folder / "recorded").rename(folder / "step.jsonl")
        self._environment = environment_of_tests(
            PATH=f"{programs}:{os.environ['PATH']}", TIERSTORE_SOCKET=str(self.socket), COLUMNS="80"
        )

    def saves(self, page: Path) -> None:
        """Save the programs that a page has its reader save."""
        for block in blocks_of(page):
            if saved := SAVED.search(block.before):
                assert any(saved[1] in command for command in TYPED[page]), f"{page}: {saved[1]} is not run"
                (self.folder / saved[1]).write_text(self._placed(block.code), encoding="utf-8")

    def starts(self, command: str) -> subprocess.Popen[bytes]:
        """Type a command as it stands, except that drives are below the folder and any free port is taken."""
        line = self._placed(command).replace(":9464", ":0")
        return subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def types(self, command: str) -> str:
        """What a command prints that has ended well. The doctor may find the drive of a busy machine too slow."""
        with self.starts(command) as process:
            printed = process.communicate(timeout=END_SECONDS)[0].decode()
        well = (0, 1) if command.startswith("tierstore doctor") else (0,)
        assert process.returncode in well, f"{command}: exit code {process.returncode}: {printed}"
        return printed

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """The daemon of a command until the end; it ends well."""
        for directory in re.findall(r"--path (\S+)", self._placed(command)):
            Path(directory).mkdir(parents=True)
        with self.starts(command) as daemon:
            try:
                ends_at = time.monotonic() + READY_SECONDS
                while not self.socket.exists():
                    assert daemon.poll() is None, daemon.communicate()[0].decode()
                    assert time.monotonic() < ends_at
                    time.sleep(0.01)  # nothing announces a socket
                yield
            finally:
                daemon.terminate()
                said = daemon.communicate(timeout=END_SECONDS)[0].decode()
        assert daemon.returncode == 0, said

    def _placed(self, text: str) -> str:
        return re.sub(r"(?<![\w/])/nvme", f"{self.folder}/nvme", text)


@pytest.fixture
def terminal(short_directory: Path) -> Terminal:
    return Terminal(short_directory)


def _marked(page: Path) -> object:
    is_long = any(block.before.startswith(LONG) for block in CONSOLES[page])
    marks = [pytest.mark.many] if is_long else [pytest.mark.slow] if page.name == "fsdp2.md" else []
    return pytest.param(page, id=name_of(page), marks=marks)


def shortened(command: str) -> str:
    """The same command with the options of `SHORT`, without the comment behind it."""
    words = shlex.split(command, comments=True)
    begins = " ".join(words[:2])
    return shlex.join(words) if begins not in SHORT else shlex.join([*words[:2], *SHORT[begins].split(), *words[2:]])


@pytest.mark.parametrize("page", [*map(_marked, TYPED)])
def test_commands_of_a_page_end_well(page: Path, terminal: Terminal) -> None:
    terminal.saves(page)
    commands = [shortened(command) for command in TYPED[page]]
    daemons = [command for command in commands if command.startswith("tierstore serve")]
    with ExitStack() as stack:
        for daemon in daemons:
            stack.enter_context(terminal.serving(daemon))
        for command in commands:
            if command not in daemons:
                assert terminal.types(command).strip(), f"{command}: prints nothing"


def test_each_block_has_prompts_and_tests_of_the_other_pages_exist() -> None:
    for page, blocks in CONSOLES.items():
        for block in blocks:
            assert is_run_elsewhere(block) or commands_of(block.code), f"{name_of(page)}:{block.line}"
    for page_and_test in ELSEWHERE.items():
        assert all((ROOT / path).is_file() for path in page_and_test), page_and_test
