"""The recipes of docs/how_to/recipes.md as they stand there, and the small programs into which they are pasted."""

from __future__ import annotations

import os
import re
import threading
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses
from torch.utils.data import DataLoader, TensorDataset

from tests.descriptors import descriptors_of
from tests.hooks.programs import Bits, all_bits
from tierstore import StoreClosedError, TierStore

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "recipes.md"
NUM_STEPS = 3
NUM_BLOCKS = 2
WIDTH = 64
ROWS = 4096  # so that a saved tensor takes 1 MiB at least: smaller ones may stay, by default


def recipes(page: Path = PAGE) -> dict[str, str]:
    """The blocks of code that a page names."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"^<!-- recipe: ([^\n]+) -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


class SpillingStore(TierStore):
    """A store with no memory to hold anything: all that it is given goes to disk, however small."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, host_bytes=0, staging_bytes=0, **options)

    @classmethod
    def connect(cls, address: str | os.PathLike[str] | None = None, **options: Any) -> SpillingStore:  # type: ignore[override]
        return super().connect(address, host_bytes=0, staging_bytes=0, **options)


class _NoScope(ContextDecorator):
    def __init__(self, _: TierStore, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _not_offloaded(module: nn.Module, *, store: TierStore) -> nn.Module:
    return module


def paste(code: str, program: dict[str, Any], *, offloads: bool) -> None:
    """Run a recipe's lines, with what they save stored or not. `program`: the names that they find, and leave theirs
    in."""
    program["__name__"] = "__main__"
    exec(recipes()["imports"], program)
    program["TierStore"] = SpillingStore
    if not offloads:
        program |= {"tiered_offload": _NoScope, "offload_module": _not_offloaded}
    exec(compile(code, str(PAGE), "exec"), program)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.layers(batch)


class Net(nn.Module):
    """The same weights every time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch


class Lesson:
    """A training that a recipe is to run, and what came of it.

    Attributes:
        model, loader, optimizer: of the training.
        losses: of each call of `loss_fn`.
    """

    def __init__(self, rank: int = 0, rows: int = ROWS) -> None:
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        torch.manual_seed(1 + rank)  # the ranks' batches and dropouts differ
        shape = (NUM_STEPS * rows, WIDTH)
        self.loader = DataLoader(TensorDataset(torch.randn(shape), torch.randn(shape)), batch_size=rows)
        self.losses: list[float] = []

    def loss_fn(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(outputs, targets)
        self.losses.append(loss.item())
        return loss

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """A loop as anybody's, that knows of no store."""
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
        for inputs, targets in self.loader:
            self.loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    def names(self) -> dict[str, Any]:
        """Those that the page says a program has."""
        return {name: getattr(self, name) for name in ("model", "loader", "optimizer", "loss_fn", "train")}

    def outcome(self) -> list[float | Bits]:
        """Losses, and the bits of this process's part of the parameters."""
        parameters = [getattr(one, "to_local", lambda one=one: one)() for one in self.model.parameters()]
        return [*self.losses, *all_bits(parameters)]


def is_closed(store: TierStore) -> bool:
    try:
        store.put(torch.ones(1))
    except StoreClosedError:
        return True
    return False


def threads_left() -> list[str]:
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("tierstore")]
    for thread in ours:
        thread.join(10)
    return [thread.name for thread in ours if thread.is_alive()]


def files_left(directory: str | Path) -> list[str]:
    """What this process has open there, files without a name included."""
    return [target for target in descriptors_of().values() if str(directory) in target]
