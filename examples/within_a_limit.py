"""Train a model that nobody has tuned for within a limit of memory: a U-Net with attention.

python examples/within_a_limit.py [PATH] [--share 0.75]    # PATH: on the drive; default: /tmp

The limit is a share of the resident memory that a plain step takes. The plan is told the limit, the model and how to
compute the loss, and nothing else. Gradients and running statistics are compared with those of the plain model.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import nn
from torch.nn import functional

from tierstore import TierStore, plan_memory

MIB = 2**20


def convolutions(before: int, after: int) -> nn.Module:
    """Two convolutions with batch norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.SiLU(), nn.Dropout(0.1),
    )  # fmt: skip


class Attention(nn.Module):
    """Attention over all places of a small picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.attention = nn.MultiheadAttention(channels, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 of shape [batch, channels, height, width], to the same shape."""
        places = self.norm(x).flatten(2).transpose(1, 2)
        mixed = self.attention(places, places, places, need_weights=False)[0]
        return x + mixed.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Three resolutions, attention at the lowest one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(3, width), convolutions(width, 2 * width)])
        self.middle = nn.Sequential(convolutions(2 * width, 4 * width), Attention(4 * width))
        self.up = nn.ModuleList([convolutions(6 * width, 2 * width), convolutions(3 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 of shape [batch, 3, height, width], to the same shape."""
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), skipped.pop()], 1))
        return self.out(x)


def peak_bytes() -> int:
    """The most resident memory of this process since the last call."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    return int(found[1]) * 1024 if found else 0


def step(model: nn.Module, pictures: torch.Tensor) -> list[torch.Tensor]:
    """One step from the same state; returns gradients and buffers afterwards."""
    torch.manual_seed(1)
    model.zero_grad()
    functional.mse_loss(model(pictures), pictures).backward()
    return [parameter.grad.clone() for parameter in model.parameters()] + [buffer.clone() for buffer in model.buffers()]


def main(path: str, share: float) -> None:
    """Train plainly, then within the limit."""
    torch.manual_seed(0)
    model, pictures = UNet(), torch.rand(16, 3, 128, 128)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step(model, pictures)
    peak_bytes()
    model.load_state_dict(before, strict=False)
    plain = step(model, pictures)
    plain_bytes = peak_bytes()
    model.zero_grad()
    limit_bytes = int(share * plain_bytes)

    with TierStore(path) as store:
        plan = plan_memory(
            model, lambda: functional.mse_loss(model(pictures), pictures), store=store, limit=limit_bytes
        )
        print(plan)
        plan.apply(model)
        peak_bytes()
        for _ in range(3):
            model.load_state_dict(before, strict=False)
            planned = step(model, pictures)
        planned_bytes = peak_bytes()
        plan.remove(model)

    same = all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
    print(f"peak of a plain step: {plain_bytes / MIB:.0f} MiB; limit: {limit_bytes / MIB:.0f} MiB")
    print(f"peak of planned steps: {planned_bytes / MIB:.0f} MiB")
    print(f"gradients and buffers bitwise identical: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?")
    parser.add_argument("--share", type=float, default=0.75, metavar="SHARE", help="of the plain peak")
    arguments = parser.parse_args()
    main(arguments.path or gettempdir(), arguments.share)
