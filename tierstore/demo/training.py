"""One training run of the demo, in a process of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..hooks import tiered_offload
from ..store.tier_store import TierStore
from .compare import RunReport, Say
from .memory import PeakHostMemory
from .model import ByteTransformer, ModelShape, choose_vector_kernels, random_batch
from .settings import HEAD_WIDTH, DemoSettings, load_text


def train(settings: DemoSettings, store_path: str | None, host_bytes: int, say: Say) -> RunReport:
    """Train for the steps asked for, and report. `store_path`: None: plainly, without a store. Raises ConfigError:
    device, text or the store's options cannot be used."""
    device = find_device(settings.device)
    if store_path is None:  # the first run: it tells that no argument is refused any more
        say(f"on {describe(device)}")
    model, optimizer, batches = prepare(settings, device)
    is_on_cpu = device.type == "cpu"
    level_bytes = 0
    if not is_on_cpu:
        torch.accelerator.reset_peak_memory_stats(device)
        level_bytes = torch.accelerator.memory_allocated(device)
    steps: list[tuple[float, float, dict[str, str]]] = []
    with PeakHostMemory() as host, ExitStack() as opened:
        store = None
        if store_path is not None:
            store = opened.enter_context(TierStore(store_path, host_bytes=f"{host_bytes}B", return_memory="always"))
        for number in range(1, settings.steps + 1):
            scope = nullcontext() if store is None else tiered_offload(store)
            steps.append(run_step(model, optimizer, next(batches), scope))
            say(f"step {number} of {settings.steps}: {steps[-1][0]:.2f} s, loss {steps[-1][1]:.3f}")
        stats = None if store is None else store.stats().as_dict()
    step_seconds, losses, digests = zip(*steps, strict=True)
    return RunReport(
        device=describe(device),
        torch_version=str(torch.__version__),
        step_seconds=step_seconds,
        losses=losses,
        digests=digests,
        peak_host_bytes=host.added_bytes,
        peak_device_bytes=None if is_on_cpu else torch.accelerator.max_memory_allocated(device) - level_bytes,
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


def run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    scope: AbstractContextManager[object],
) -> tuple[float, float, dict[str, str]]:
    """Forward, backward and the optimizer's step. Returns seconds, loss and digests; these are not timed."""
    started = time.perf_counter()
    with scope:
        loss = model(*batch)
    loss.backward()
    value = loss.item()  # waits for an accelerator
    halfway = time.perf_counter()
    digests = {"loss": digest(loss)} | {name: digest(each.grad) for name, each in model.named_parameters()}
    resumed = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    if loss.device.type != "cpu":
        torch.accelerator.synchronize(loss.device)
    return halfway - started + time.perf_counter() - resumed, value, digests


def digest(tensor: Tensor | None) -> str:
    """SHA-256 over the raw bytes of a tensor, in row-major order."""
    if tensor is None:
        return "none"
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def find_device(name: str) -> torch.device:
    """The device to train on. Raises ConfigError: torch knows no such device, or this machine has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = "cpu" if accelerator is None else f"cpu, {accelerator.type}"
        raise ConfigError("--device", name, f"this machine and its torch offer: auto, {found}") from error
    return device


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return f"GPU ({torch.cuda.get_device_name(device)})"
    return f"CPU ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type
