"""The recipe for Ray Train, in a program of its own.

    python -m tests.integrations.recipe_in_ray PATH OUT

Each of two workers writes lines of JSON to OUT/rank-N: what came of the training with a store, what is left of the
store, and what came of the training without one. The numbers that both workers report go to OUT/metrics.json.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.torch import TorchTrainer
from torch import nn

from tests.integrations.recipe_programs import Lesson, Net, files_left, paste, recipes, threads_left


def write_line(out: Path, value: object) -> None:
    with (out / f"rank-{ray.train.get_context().get_world_rank()}").open("a") as file:
        print(json.dumps(value), file=file)


def train(model: nn.Module, *, out: Path) -> None:
    torch.set_num_threads(1)
    lesson = Lesson(ray.train.get_context().get_world_rank())
    lesson.model = model.module
    lesson.train(model)
    write_line(out, [lesson.losses, hashlib.sha256(repr(lesson.outcome()).encode()).hexdigest()])


class Numbers(ray.train.UserCallback):
    """Takes what the workers report, as the page says."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def after_report(self, run_context: object, metrics: list[dict[str, Any]], checkpoint: object) -> None:
        (self.out / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")


def trainer(loop: Callable[[dict[str, Any]], None], *, out: Path, **options: Any) -> TorchTrainer:
    """Its workers train twice: by the recipe, and without a store."""

    def both_loops(config: dict[str, Any]) -> None:
        loop(config)
        write_line(out, threads_left() + files_left(config["path"]))
        train(ray.train.torch.prepare_model(Net()), out=out)

    run = ray.train.RunConfig(storage_path=str(out / "results"), callbacks=[Numbers(out)])
    return TorchTrainer(both_loops, run_config=run, **options)


def main() -> None:
    path, out = sys.argv[1], Path(sys.argv[2])
    names = {"path": path, "make_model": Net, "train": partial(train, out=out)}
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        with mock.patch("ray.train.torch.TorchTrainer", partial(trainer, out=out)):
            paste(recipes()["ray"], names, offloads=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
