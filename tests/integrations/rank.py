"""One rank of trainings under torchrun: plainly, then with the store, by each trainer. Its report is a JSON file.

Arguments: the directory of the stores, the directory of the reports.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

RANK = int(os.environ["RANK"])


def digest(parameters: Any) -> list[str]:
    return [parameter.detach().numpy().tobytes().hex() for parameter in parameters]


def with_transformers(drive: Path | None, out: Path) -> dict[str, Any]:
    from tests.integrations.test_transformers import logged, trainer_of
    from tierstore.integrations.transformers import offload_trainer

    trainer = trainer_of(out / f"{drive}".replace("/", "-"), ddp_backend="gloo")
    if drive is not None:
        offload_trainer(trainer, drive, store_options={"host_bytes": 0}, min_bytes=0)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    stored = logged(trainer, "tierstore/packed_gib")
    return {"losses": losses, "parameters": digest(trainer.model.parameters()), "stored": stored}


def with_lightning(drive: Path | None, out: Path) -> dict[str, Any]:
    from tests.integrations.test_lightning import Module, callback_of, fit

    module = Module()
    callbacks = [] if drive is None else [callback_of(drive)]
    trainer = fit(out, callbacks, module, strategy="ddp", devices=2, logger=False)  # type: ignore[arg-type]
    stored = [value.item() for name, value in trainer.logged_metrics.items() if name == "tierstore/packed_gib"]
    return {"losses": module.losses, "parameters": digest(module.parameters()), "stored": stored}


def main(drive: str, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report = {}
    for name, run in {"transformers": with_transformers, "lightning": with_lightning}.items():
        report[name] = {"plain": run(None, Path(out)), "stored": run(Path(drive), Path(out))}
    (Path(out) / f"rank-{RANK}.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
