"""The examples of docs/how_to/trainers.md, taken from the page and executed."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.left import directory, what_is_left
from tests.integrations.recipe_programs import PAGE, recipes

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

EXAMPLES = recipes(PAGE.with_name("trainers.md"))


def test_page_has_these_examples_short_enough_to_paste() -> None:
    assert sorted(EXAMPLES) == ["lightning", "transformers"]
    assert all(len(list(filter(None, code.splitlines()))) <= 8 for code in EXAMPLES.values())


def test_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    from tests.integrations.language import Tokens, tiny_model
    from tests.integrations.test_transformers import trainer_of

    names: dict[str, Any] = {"model": tiny_model(), "data": Tokens(8), "path": str(directory(tmp_path))}
    exec(EXAMPLES["transformers"], names | {"arguments": trainer_of(tmp_path).args})
    assert "tierstore: " in capsys.readouterr().out
    assert what_is_left(directory(tmp_path)) == []


def test_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    pytest.importorskip("lightning")
    from tests.integrations.test_lightning import Module, batches

    monkeypatch.chdir(tmp_path)  # the trainer writes its logs there
    exec(EXAMPLES["lightning"], {"module": Module(), "loader": batches(), "path": str(directory(tmp_path))})
    assert "tierstore: " in capsys.readouterr().out
    assert what_is_left(directory(tmp_path)) == []
