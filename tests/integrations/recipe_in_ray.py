"""The recipe for Ray Train, in a program of its own: `python -m tests.integrations.recipe_in_ray PATH OUT`.

Each worker writes three lines of JSON to OUT/rank-N: what came of the training with a store, what came of it without
one, and what is left of the store. The controller writes the numbers that all workers report to OUT/metrics.json.
"""

from __future__ import annotations

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

Loop = Callable[[dict[str, Any]], None]


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


def trainer(loop: Loop, *, out: Path, **options: Any) -> TorchTrainer:
    """A `TorchTrainer` whose workers train once more after the recipe, without a store."""

    def all_loops(config: dict[str, Any]) -> None:
        loop(config)
        left = threads_left() + files_left(config["path"])
        train(ray.train.torch.prepare_model(Net()), out=out)
        write_line(out, left)

    run = ray.train.RunConfig(storage_path=str(out / "results"), callbacks=[Numbers(out)])
    return TorchTrainer(all_loops, run_config=run, **options)


def main() -> None:
    path, out = sys.argv[1], Path(sys.argv[2])
    names = {"path": path, "make_model": Net, "train": partial(train, out=out)}
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=str(out / "ray"))
    with mock.patch("ray.train.torch.TorchTrainer", partial(trainer, out=out)):
        paste(recipes()["ray"], names, offloads=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
