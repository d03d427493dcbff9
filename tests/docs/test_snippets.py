"""Code on the pages works: Python is executed, and commands have options that exist.

Blocks of Python are executed here, those of a page one after the other. The exceptions: a comment
`<!-- recipe: NAME -->` stands before the block (`tests/integrations` executes it); its page is a tutorial
(`test_tutorial.py`) or README (`tests/test_readme.py`); the reader saves it as a file (`test_commands.py`); or the line
before it begins with `NOT_RUN` and says why.
"""

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main
import yaml
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import tierstore
from tests.command_line import record_two_steps
from tests.docs.pages import ALL_PAGES, DOCS, ROOT, Block, blocks_of, commands_of
from tierstore import MemoryPlan, TierStore, cli, offload_module, plan_memory, tiered_offload

NOT_RUN = "*Not run by the tests:"
SAVED = re.compile(r"Save this as `(\w+\.py)`:$")
RECIPE = re.compile(r"<!-- recipe: (.+) -->")


def is_run_elsewhere(block: Block) -> bool:
    before = block.before
    return bool(before.startswith(NOT_RUN) or RECIPE.match(before) or SAVED.search(before))


PYTHON = {
    page: blocks
    for page in ALL_PAGES
    if (blocks := [block for block in blocks_of(page) if block.language in ("python", "py", "pycon")])
}
EXECUTED = {
    page: own
    for page, blocks in PYTHON.items()
    if page.parent != DOCS / "tutorial" and page != ROOT / "README.md"
    if (own := [each for each in blocks if not is_run_elsewhere(each)])
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- programs -----------------------------------------------------------------------------------------------------


class Model(nn.Sequential):
    """Gives what the models of transformers do: something with a loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, batch: torch.Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(batch).square().mean())


def names_of_a_program(drive: Path) -> dict[str, Any]:
    """What the blocks of a page find: the parts of a training that pages leave out."""
    model = Model()
    batch = torch.randn(4096, 64)
    return {
        "__name__": "__main__",
        "model": model,
        "block": nn.Sequential(nn.Linear(64, 64), nn.GELU()),
        "batch": batch,
        "batches": [batch, batch],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "path": str(drive),
        "store": TierStore(drive, host_bytes=0, disk_bytes="1GiB"),
        "train": lambda store: train(model, batch, store),
        "plan": None,
        **{each.__name__: each for each in (TierStore, MemoryPlan, offload_module, plan_memory, tiered_offload)},
        **{each.__name__: each for each in (torch, nn, functools, tierstore, checkpoint, CheckpointPolicy)},
        "nn": nn,
    }


def train(model: nn.Module, batch: torch.Tensor, store: TierStore) -> None:
    with tiered_offload(store, min_bytes=0):
        loss = model(batch).loss
    loss.backward()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    for name in ("nvme", "nvme0", "nvme1"):
        (tmp_path / name).mkdir()
    names = names_of_a_program(tmp_path / "nvme")
    first = names["store"]
    yield names
    for each in (first, *names.values()):
        if isinstance(each, TierStore):
            each.close()


def run(page: Path, block: Block, names: dict[str, Any], folder: Path) -> None:
    """Execute it as it stands, except that drives are below `folder`. Lines of errors are those of the page."""
    code = re.sub(r"(?<![\w/])/nvme", f"{folder}/nvme", block.code)
    exec(compile("\n" * block.line + code, str(page), "exec"), names)


@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_python_of_a_page(page: Path, program: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = "".join(block.code for block in EXECUTED[page])
    if "step.jsonl" in text and "trace=" not in text.replace("# tiered_offload(store, trace=", ""):
        (tmp_path / "recorded").mkdir()
        record_two_steps(tmp_path / "recorded").rename(tmp_path / "step.jsonl")
    if "connect(" in text:
        daemon = request.getfixturevalue("start_daemon")(tmp_path / "shared")
        request.getfixturevalue("monkeypatch").setenv("TIERSTORE_SOCKET", str(daemon.socket))
    for block in EXECUTED[page]:
        run(page, block, program, tmp_path)


# --- configuration --------------------------------------------------------------------------------------------------


def configuration(*languages: str) -> list[Any]:
    return [
        pytest.param(block.code, id=f"{name_of(page)}:{block.line}")
        for page in ALL_PAGES
        for block in blocks_of(page)
        if block.language in languages
    ]


@pytest.mark.parametrize("text", configuration("toml"))
def test_configuration_file_of_a_page_opens_a_store(text: str, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    file = tmp_path / "tierstore.toml"
    file.write_text(text.replace('"/nvme"', f'"{tmp_path}/nvme"'), encoding="utf-8")
    with TierStore.from_config(file) as store:
        with tiered_offload.from_config(store, file):
            loss = Model()(torch.randn(8, 64)).loss
        loss.backward()


@pytest.mark.parametrize("text", configuration("yaml", "yml"))
def test_configuration_of_another_program_can_be_read(text: str) -> None:
    """Its lines for tierstore are commands that exist."""
    assert yaml.safe_load(text)
    for command in re.findall(r"tierstore serve [^>&\n]+", text):
        test_command_of_a_page_has_options_that_exist(command.strip())


# --- nothing is left out --------------------------------------------------------------------------------------------


def test_recipes_are_executed_by_the_tests_of_the_integrations() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests" / "integrations").glob("*.py"))
    blocks = [block for page in ALL_PAGES for block in blocks_of(page)]
    named = {match[1] for each in blocks if (match := RECIPE.match(each.before))}
    assert named
    assert {name for name in named if f'"{name}"' not in tests} == set()


# --- commands -------------------------------------------------------------------------------------------------------

COMMANDS = [
    pytest.param(command, id=f"{name_of(page)}:{block.line}")
    for page in ALL_PAGES
    for block in blocks_of(page)
    if block.language in ("console", "bash", "sh", "shell")
    for command, _ in commands_of(block.code)
]


@pytest.mark.parametrize("command", [each for each in COMMANDS if str(each.values[0]).startswith("tierstore ")])
def test_command_of_a_page_has_options_that_exist(command: str) -> None:
    words = shlex.split(command, comments=True)
    words = words[1 : words.index("|")] if "|" in words else words[1:]
    group: Any = typer.main.get_command(cli.app)
    context = group.make_context("tierstore", words)
    while hasattr(group, "commands"):
        name, group, words = group.resolve_command(context, words)
        context = group.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("command", [each for each in COMMANDS if str(each.values[0]).startswith("make ")])
def test_target_of_a_page_exists(command: str) -> None:
    words = [word for word in shlex.split(command, comments=True)[1:] if "=" not in word]
    assert set(words) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
