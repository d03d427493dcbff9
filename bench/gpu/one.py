"""One variant of one workload, measured in this process. The request tells workload ("floors", "saved tensor": those),
variant, options, device, steps, scratch."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .floors import measure_floors
from .saved_tensor import measure_saved_tensor
from .timing import Stopwatch, wait_for
from .variants import Prepared, prepare
from .workloads import WORKLOADS

WARM_UP_STEPS = 2
"""The first finds the order of backward, the second is the first that follows it."""
WARM_UP_STEPS_OF_AUTO = 5
"""It learns from those that follow the order."""

Figures = dict[str, Any]


def measure(request: dict[str, Any]) -> Figures:
    device, scratch = torch.device(request["device"]), Path(request["scratch"])
    if request["workload"] == "floors":
        return measure_floors(device, scratch, tiny=request["tiny"])
    if request["workload"] == "saved tensor":
        return measure_saved_tensor(device, scratch, tiny=request["tiny"])
    workload = WORKLOADS[request["workload"]].with_batch(request.get("batch"))
    model, batch = workload.model(device), workload.batch(device)
    began = time.perf_counter()
    with prepare(request["variant"], model, batch, scratch, request["options"]) as prepared:
        prepared_seconds = time.perf_counter() - began
        is_automatic = request["options"].get("device_bytes") == "auto"
        num_warm_up = request["options"].get("num_warm_up", WARM_UP_STEPS_OF_AUTO if is_automatic else WARM_UP_STEPS)
        figures = _train(model, batch, prepared, num_warm_up, request["steps"])
        if figures["step_seconds"] < 1:  # one more step
            figures["resident_bytes"] = _resident_bytes(model, batch, prepared)
    figures |= {"batch": len(batch[0]), "prepared_seconds": prepared_seconds}
    if "limit" in request["options"]:
        figures["limit_bytes"] = request["options"]["limit"]
    if request["variant"] == "none":
        figures |= _saved(model, batch)
    if workload.tokens:
        figures["tokens_per_second"] = workload.tokens / figures["step_seconds"]
    return figures


def _train(
    model: nn.Module, batch: tuple[torch.Tensor, ...], prepared: Prepared, num_warm_up: int, num_steps: int
) -> Figures:
    """Medians over the steps after the first ones; the sum of the last gradients, which all variants must share."""
    device, store = batch[0].device, prepared.store
    for _ in range(num_warm_up):
        _step(model, batch, prepared, Stopwatch(device))
        if store is not None:  # a step through memory that is not pinned yet is of another kind
            store._core.residency.slab.wait_until_pinned()
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = store.stats() if store is not None else None
    steps: list[tuple[float, ...]] = []
    for _ in range(num_steps):
        watch, began = Stopwatch(device), time.perf_counter()
        queueing_seconds = _step(model, batch, prepared, watch)
        steps.append((queueing_seconds, *watch.seconds(), time.perf_counter() - began))
    queueing, forward, backward, whole = zip(*steps, strict=True)
    figures: Figures = {
        "step_seconds": statistics.median(whole),
        "most_step_seconds": max(whole),
        "least_step_seconds": min(whole),
        "forward_seconds": statistics.median(forward),
        "forward_queueing_seconds": statistics.median(queueing),
        "backward_seconds": statistics.median(backward),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "gradients": sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None),
    }
    if store is not None and before is not None:
        after = store.stats()
        for name in ("packed_bytes", "offloaded_bytes", "reloaded_bytes", "spilled_bytes", "restored_bytes",
                     "pageable_copy_bytes"):  # fmt: skip
            figures[name] = (getattr(after, name) - getattr(before, name)) / num_steps
        figures["stalls_seconds"] = sum(after.stall_seconds.values()) - sum(before.stall_seconds.values())
        figures["host_memory"] = after.host_memory
    return figures


def _step(model: nn.Module, batch: tuple[torch.Tensor, ...], prepared: Prepared, watch: Stopwatch) -> float:
    """Returns how long the thread that trains was busy with forward; the device may be so for longer."""
    model.zero_grad()
    watch.mark()
    began = time.perf_counter()
    with prepared.around():
        loss = model(*batch)
    queueing_seconds = time.perf_counter() - began
    watch.mark()
    loss.backward()
    watch.mark()
    return queueing_seconds


def _resident_bytes(model: nn.Module, batch: tuple[torch.Tensor, ...], prepared: Prepared) -> int:
    """What a forward leaves on the device for backward, once all copies are over."""
    device = batch[0].device
    if device.type != "cuda":
        return 0
    model.zero_grad()
    wait_for(device)
    before_bytes = torch.cuda.memory_allocated(device)
    with prepared.around():
        loss = model(*batch)
    wait_for(device)
    if prepared.store is not None:
        prepared.store.flush()
    resident_bytes = torch.cuda.memory_allocated(device) - before_bytes
    loss.backward()
    return resident_bytes


def _saved(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Figures:
    """Of all storages of 1 MiB and more (or all, of a tiny model) that a forward saves and nobody holds anyway."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *batch)}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)
    del loss
    sizes = [size for size in seen.values() if size >= 2**20] or list(seen.values())
    return {"saved_bytes": sum(sizes), "largest_saved_bytes": max(sizes)}
