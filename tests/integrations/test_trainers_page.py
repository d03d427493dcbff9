"""The examples of docs/how_to/trainers.md and gpu.md, taken from the pages and executed."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.left import directory, what_is_left
from tests.integrations.recipe_programs import PAGE, recipes

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

EXAMPLES = recipes(PAGE.with_name("trainers.md")) | recipes(PAGE.with_name("gpu.md"))


def test_pages_have_these_examples_short_enough_to_paste() -> None:
    both = ("lightning", "transformers")
    assert sorted(EXAMPLES) == sorted([*both, *(f"{name}, checkpoints" for name in both)])
    assert all(len(list(filter(None, code.splitlines()))) <= 8 for code in EXAMPLES.values())


@pytest.mark.parametrize("example", ["transformers", "transformers, checkpoints"])
def test_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str], example: str) -> None:
    pytest.importorskip("accelerate")
    from tests.integrations.language import Tokens, tiny_model
    from tests.integrations.test_transformers import trainer_of

    names: dict[str, Any] = {"model": tiny_model(), "data": Tokens(8), "path": str(directory(tmp_path))}
    exec(EXAMPLES[example], names | {"arguments": trainer_of(tmp_path).args})
    assert "tierstore: " in capsys.readouterr().out
    assert what_is_left(directory(tmp_path)) == []


@pytest.mark.parametrize("example", ["lightning", "lightning, checkpoints"])
def test_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, example: str) -> None:
    pytest.importorskip("lightning")
    from tests.integrations.test_lightning import Module, batches

    monkeypatch.chdir(tmp_path)  # the trainer writes its logs there
    exec(EXAMPLES[example], {"module": Module(), "loader": batches(), "path": str(directory(tmp_path))})
    assert "tierstore: " in capsys.readouterr().out
    assert what_is_left(directory(tmp_path)) == []
