"""One training run in a process of its own: `python -m tierstore.demo.worker`, started by `launch.py`.

Its only argument is a `RunRequest` as JSON. It writes one JSON object per line to standard output: `{"started":
device}`, `{"step": number, "loss": nats}` after each step, and last `{"report": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, TierStoreError
from .memory import PeakHostMemory
from .model import ByteTransformer, ModelShape, random_batch
from .runs import RunReport, RunRequest
from .settings import HEAD_WIDTH, DemoSettings
from .text import load_text
from .vector_math import choose_vector_kernels

__all__ = ["main"]

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class VariantScope:
    """The scope of a variant's forward passes, and its statistics at the end.

    Attributes:
        forward: makes the context manager around one forward pass.
        stats: the store's statistics; `None` for the plain run.
    """

    forward: Callable[[], AbstractContextManager[object]] = nullcontext
    stats: Callable[[], dict[str, Any] | None] = lambda: None


@dataclass
class TimedSteps:
    """The measurements of each step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)


def main() -> int:
    """Run the request in the argument. Returns the exit code: 0 if a report was written."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output cannot break the protocol

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    request = json.loads(sys.argv[1])
    try:
        report = train(RunRequest(**request | {"settings": DemoSettings(**request["settings"])}), emit)
    except TierStoreError as error:
        emit({"error": type(error).__name__, "fields": vars(error)})
        return 1
    emit({"report": asdict(report)})
    return 0


def train(request: RunRequest, emit: Emit) -> RunReport:
    """Train for the steps asked for, and report.

    Raises:
        ConfigError: device, text or the store's options cannot be used.
        TierStoreError: the store failed.
    """
    settings = request.settings
    device = find_device(settings.device)
    emit({"started": describe(device)})
    model, optimizer, batches = prepare(settings, device)
    open_scope = prepare_scope(request)
    level_device_bytes = start_device_peak(device)
    steps = TimedSteps()
    with PeakHostMemory() as host, open_scope() as scope:
        for number in range(1, settings.steps + 1):
            run_step(model, optimizer, next(batches), scope, steps)
            emit({"step": number, "loss": steps.losses[-1]})
        stats = scope.stats()
    return RunReport(
        device=describe(device),
        torch_version=torch.__version__,
        num_threads=torch.get_num_threads(),
        step_seconds=steps.seconds,
        losses=steps.losses,
        digests=steps.digests,
        peak_host_bytes=host.added_bytes,
        peak_device_bytes=None if level_device_bytes is None else device_peak(device) - level_device_bytes,
        stats=stats,
    )


def prepare(
    settings: DemoSettings, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[tuple[Tensor, Tensor]]]:
    """Model, optimizer and an endless sequence of batches. The same seed gives the same ones."""
    choose_vector_kernels()
    torch.manual_seed(settings.seed)
    if device.type != "cpu":
        # On the CPU nothing that the model uses is nondeterministic.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # module property
    shape = ModelShape(settings.layers, settings.width, settings.width // HEAD_WIDTH, settings.context)
    model = ByteTransformer(shape).to(device)
    text = load_text(settings.text, at_least_bytes=settings.context + 1)
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(settings.seed)
        while True:
            tokens, targets = random_batch(corpus, settings.batch, settings.context, generator)
            yield tokens.to(device), targets.to(device)

    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches()


def prepare_scope(request: RunRequest) -> Callable[[], AbstractContextManager[VariantScope]]:
    """Import what the variant needs now. Calling the result opens the scope, once memory is being sampled."""
    if request.store_path is None:
        return lambda: nullcontext(VariantScope())
    from tierstore import TierStore, tiered_offload

    path, host_bytes = request.store_path, request.host_bytes

    @contextmanager
    def opened() -> Iterator[VariantScope]:
        with TierStore(path, host_bytes=host_bytes, return_memory="always") as store:
            yield VariantScope(forward=lambda: tiered_offload(store), stats=lambda: store.stats().as_dict())

    return opened


def run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    scope: VariantScope,
    steps: TimedSteps,
) -> None:
    """Forward, backward, digests of the gradients, and the optimizer's step. The digests are not timed."""
    started = time.perf_counter()
    with scope.forward():
        loss = model(*batch)
    loss.backward()
    value = loss.item()  # waits for an accelerator
    halfway = time.perf_counter()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    steps.digests.append({"loss": digest(loss)} | {name: digest(gradient) for name, gradient in gradients.items()})
    resumed = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    synchronize(loss.device)
    steps.seconds.append(halfway - started + time.perf_counter() - resumed)
    steps.losses.append(value)


def digest(tensor: Tensor | None) -> str:
    """SHA-256 over the raw bytes of a tensor, in row-major order."""
    if tensor is None:
        return "none"
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def find_device(name: str) -> torch.device:
    """The device to train on.

    Raises:
        ConfigError: torch knows no such device, or this machine has none.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = "cpu" if accelerator is None else f"cpu, {accelerator.type}"
        raise ConfigError("--device", name, f"this machine and its torch offer: auto, {found}") from error
    return device


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return f"GPU ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"CPU ({torch.get_num_threads()} threads)"
    return device.type


def start_device_peak(device: torch.device) -> int | None:
    """Forget the accelerator's peak so far; returns the bytes allocated now, `None` on the CPU."""
    if device.type == "cpu":
        return None
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)


def device_peak(device: torch.device) -> int:
    """The most bytes allocated on the accelerator since `start_device_peak`."""
    return torch.accelerator.max_memory_allocated(device)


def synchronize(device: torch.device) -> None:
    """If the device is an accelerator, wait until it has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
