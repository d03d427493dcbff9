"""What docs/how_to/migrate.md has people change is executed, before and after where both run without a GPU."""

import ast
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import yaml
from torch import nn

from tests.docs.pages import DOCS, blocks_of
from tests.hooks.programs import all_bits
from tests.integrations.left import directory, what_is_left
from tierstore import TierStore, tiered_offload

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

DIFFS = [block.code for block in blocks_of(DOCS / "how_to" / "migrate.md") if block.language == "diff"]
SAVE_ON_CPU, TRL, TORCHTUNE, TRANSFORMERS, AXOLOTL, DEEPSPEED, _UNSLOTH = DIFFS


def side(diff: str, mark: str) -> str:
    """The lines before ("-") or after ("+") the change."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", mark))


@pytest.mark.parametrize("mark", ["-", "+"])
def test_all_that_the_page_shows_can_be_parsed(mark: str) -> None:
    for diff in DIFFS:
        assert side(diff, mark)
        if diff is AXOLOTL:
            assert yaml.safe_load(side(diff, mark))["gradient_checkpointing"] is True
        else:
            ast.parse(side(diff, mark))


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, batch: torch.Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(batch).square().mean())


@pytest.mark.parametrize("diff", [SAVE_ON_CPU, TORCHTUNE, DEEPSPEED], ids=["save_on_cpu", "torchtune", "DeepSpeed"])
def test_loop_of_ones_own(store: TierStore, diff: str) -> None:
    def gradients(code: str) -> list[Any]:
        model = Model()
        hidden = torch.randn(5000, 64, generator=torch.Generator().manual_seed(1))
        names = {"model": model, "block": model[0], "batch": hidden, "hidden": hidden, "store": store}
        exec(code, names | {"torch": torch, "tiered_offload": tiered_offload})
        return all_bits(parameter.grad for parameter in model.parameters())

    before = side(diff, "-") if diff is SAVE_ON_CPU else side(diff, "+").replace("with tiered_offload", "if True:  # ")
    assert gradients(side(diff, "+")) == gradients(before)
    assert store.stats().packed_bytes > 0


def test_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.integrations.language import Tokens, tiny_model
    from tierstore.integrations.transformers import offload_trainer

    short = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    monkeypatch.chdir(tmp_path)

    def parameters(mark: str) -> list[Any]:
        names = {
            "TrainingArguments": partial(transformers.TrainingArguments, **short),
            "Trainer": transformers.Trainer,
            "offload_trainer": partial(offload_trainer, min_bytes=0),
            "model": tiny_model(),
            "data": Tokens(8),
        }
        code = side(TRANSFORMERS, mark).replace('{"offload": True}', "None")  # it needs a GPU
        exec(code.replace("/nvme", str(directory(tmp_path))), names)
        return all_bits(names["model"].parameters())  # type: ignore[attr-defined]

    assert parameters("+") == parameters("-")
    assert what_is_left(directory(tmp_path)) == []


def test_trainer_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    from tests.integrations.language import TEXT, tiny_model, tiny_tokenizer
    from tests.integrations.test_trl import COMMON
    from tierstore.integrations.transformers import offload_trainer

    monkeypatch.chdir(tmp_path)
    names = {
        "SFTConfig": partial(trl.SFTConfig, max_length=32, **COMMON),
        "SFTTrainer": partial(trl.SFTTrainer, processing_class=tiny_tokenizer()),
        "offload_trainer": partial(offload_trainer, min_bytes=0),
        "model": tiny_model(),
        "data": Dataset.from_dict({"text": [TEXT] * 8}),
    }
    exec(side(TRL, "+").replace("/nvme", str(directory(tmp_path))), names)
    assert "tierstore: " in capsys.readouterr().out
    assert what_is_left(directory(tmp_path)) == []
