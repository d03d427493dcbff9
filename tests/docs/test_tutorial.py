"""The tutorial, done as its pages say: in a home of its own, word for word.

Only the installation is made short: the environment has no pip, and finds the packages of the one that runs the tests.
`python -m tests.release` installs a release.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.daemon.conftest import END_SECONDS
from tests.docs.pages import DOCS, ROOT, Block, blocks_of, commands_of

TUTORIAL = DOCS / "tutorial"


class Page:
    """A page of the tutorial.

    Attributes:
        consoles: the commands of each block.
        shown: what the page shows that each command prints.
        files: the programs that it has the reader save, by their names.
    """

    def __init__(self, name: str) -> None:
        blocks = list(blocks_of(TUTORIAL / name))
        consoles = [commands_of(block.code) for block in blocks if block.language == "console"]
        self.consoles = [[command for command, _ in console] for console in consoles]
        self.shown = {command: output for console in consoles for command, output in console}
        self.files = {_file_of(block): block.code for block in blocks if block.language == "python"}

    def promises(self, command: str, printed: str) -> bool:
        """Whether a command printed what the page shows, apart from numbers."""
        wanted = re.sub(r"\d+", r"\\d+", re.escape(self.shown[command]))
        return re.search(wanted, printed) is not None


def _file_of(block: Block) -> str:
    found = re.search(r"`(\w+\.py)`", block.before)
    assert found, f"line {block.line}: where is it to be saved?"
    return found[1]


class Reader:
    """Somebody who types what a page says into terminals.

    Attributes:
        home: their home directory.
        folder: where the pages have them put everything.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / Path(FOLDER[0].split()[-1]).name
        self._environment: Mapping[str, str] = {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "COLUMNS": "200",
        }

    def saves(self, page: Page, folder: Path) -> None:
        for name, code in page.files.items():
            folder.joinpath(name).write_text(code, encoding="utf-8")

    def terminal(self, *typed: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        """Open a terminal and type the lines. The first that fails ends it."""
        return subprocess.Popen(
            ["bash", "-ec", "\n".join((*typed, "exit"))],
            cwd=cwd or self.home,
            env=self._environment | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def types(self, *typed: str, cwd: Path | None = None, **variables: str) -> str:
        """Type lines in a terminal that is closed at the end; what they print."""
        with self.terminal(*typed, cwd=cwd, **variables) as terminal:
            out, err = terminal.communicate(timeout=END_SECONDS * 10)
        assert terminal.returncode == 0, f"{typed}: {out}{err}"
        return out


FIRST = Page("first_training.md")
FOLDER, INSTALL, DRIVE, TRAIN, VIEW = FIRST.consoles
TRACE = Page("reading_a_trace.md")
SHOW, VIEW_AGAIN, COMPARE, REMOVE = TRACE.consoles
START, ENTER = INSTALL[1], DRIVE[1]  # in each terminal, once


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader who has done what stands under "Install", in short."""
    folder = Path("/tmp", f"ts-{os.getpid()}-{tmp_path_factory.getbasetemp().name}")
    folder.mkdir(mode=0o700)
    try:
        person = Reader(folder)
        person.types(*FOLDER, _environment_without_pip())
        install_quickly(person.folder / "environment", ROOT)
        yield person
    finally:
        shutil.rmtree(folder)


def _environment_without_pip() -> str:
    return INSTALL[0].replace("python3", sys.executable) + " --without-pip"


def install_quickly(environment: Path, source: Path) -> None:
    """Make an environment without pip find tierstore's source, and the packages of this one."""
    (packages,) = environment.glob("lib/python*/site-packages")
    found = [str(source), *(path for path in sys.path if path.endswith("-packages"))]
    packages.joinpath("packages_of_the_tests.pth").write_text("\n".join(found), encoding="utf-8")
    command = environment / "bin" / "tierstore"
    main = "from tierstore.cli import main\n\nif __name__ == '__main__':\n    main()\n"
    command.write_text(f"#!{environment}/bin/python\n{main}", encoding="utf-8")
    command.chmod(0o755)


class Trained(NamedTuple):
    """What the first two parts of the page print."""

    training: str
    view: str


@pytest.fixture(scope="module")
def trained(reader: Reader) -> Trained:
    reader.types(*DRIVE)
    reader.saves(FIRST, reader.folder)
    return Trained(*(reader.types(START, ENTER, *console) for console in (TRAIN, VIEW)))


def peaks(printed: str) -> list[int]:
    return list(map(int, re.findall(r"peak .*: (\d+) MiB", printed)))


def test_peak_falls_and_gradients_are_the_same(trained: Trained, reader: Reader) -> None:
    assert FIRST.promises(TRAIN[0], trained.training), trained.training
    assert "same gradients: True" in trained.training
    with_store, without = peaks(trained.training)
    assert with_store < 0.7 * without
    assert list((reader.folder / "drive").iterdir()) == []


def test_trace_is_drawn_and_explained(trained: Trained, reader: Reader) -> None:
    assert FIRST.promises(VIEW[0], trained.view), trained.view
    assert re.search(r"^step 1 of 1: .+\.$", trained.view, re.MULTILINE)
    assert '<canvas id="lanes">' in (reader.folder / "step.html").read_text(encoding="utf-8")
    shown = reader.types(START, ENTER, *SHOW)
    assert re.search(r"^step +seconds +forward +backward .*written +read$", shown, re.MULTILINE), shown
    assert VIEW_AGAIN == VIEW


def test_tutorial_has_nothing_else_to_do() -> None:
    assert sorted(page.name for page in TUTORIAL.iterdir()) == ["first_training.md", "reading_a_trace.md"]
    assert list(FIRST.files) == ["train.py"]
    assert TRACE.files == {}


def test_what_the_pages_remove_is_only_what_they_made(short_directory: Path) -> None:
    """A clone is naturally called as its project."""
    person = Reader(short_directory)
    names = ("tierstore", "first", "venv", ".venv", "drive")
    for name in names:
        person.types(f"mkdir {name}", f"touch {name}/mine")
    person.types(*FOLDER, _environment_without_pip(), *DRIVE)
    person.types(*REMOVE, cwd=person.folder)
    left = {str(path.relative_to(short_directory)) for path in short_directory.glob("*/*")}
    assert left == {f"{name}/mine" for name in names}
    assert {path.name for path in short_directory.iterdir()} == set(names)


@pytest.mark.many
def test_comparison_of_two_traces(trained: Trained, reader: Reader) -> None:
    """The last test of these: it changes `train.py`, as the page says."""
    shown = reader.types(START, ENTER, *COMPARE)
    with_store, without = peaks(shown)
    assert with_store > 0.8 * without
    assert re.search(r"^ *1 .* 0 B +0 B$", shown, re.MULTILINE), shown
