"""The demo's settings, checked before anything starts, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.device_files import has_driver
from ..errors import ConfigError

__all__ = ["HEAD_WIDTH", "DemoSettings", "check_device"]

HEAD_WIDTH = 64
"""Features of one attention head."""


@dataclass(frozen=True)
class DemoSettings:
    """One training run, the same for both variants.

    With the defaults the saved tensors take about a gigabyte, in pieces of 8 to 32 MiB; parameters, gradients
    and optimizer state take a tenth of that.

    Attributes:
        steps: optimizer steps.
        layers: transformer blocks.
        width: features, a multiple of `HEAD_WIDTH`.
        context: bytes of text per sequence.
        batch: sequences per step.
        text: the file to train on; `None`: the documentation that CPython carries with it.
        device: "auto" (an accelerator where there is one) or what `torch.device` takes.
        seed: of the parameters and of the order of the text.

    Raises:
        ConfigError: a number is out of range.
    """

    steps: int = 6
    layers: int = 8
    width: int = 256
    context: int = 512
    batch: int = 16
    text: str | None = None
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("steps", "layers", "width", "context", "batch"):
            if (given := getattr(self, option)) < 1:
                raise ConfigError(f"--{option}", given, "give a number of 1 or more")
        if self.width % HEAD_WIDTH:
            raise ConfigError("--width", self.width, f"give a multiple of {HEAD_WIDTH}, the width of an attention head")


def check_device(name: str) -> None:
    """Refuse an accelerator for which this machine has no driver, before torch is imported.

    Raises:
        ConfigError: there is no driver. Without the error the device may still be absent; only torch can tell.
    """
    kind = name.partition(":")[0]
    if kind in ("auto", "cpu") or has_driver(kind):
        return
    raise ConfigError("--device", name, "this machine has no driver for such a device (see /dev): give cpu, or auto")
