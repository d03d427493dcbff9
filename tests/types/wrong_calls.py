# ruff: noqa: F401
"""Seventeen wrong calls, each of which a type checker reports; what is right in between gives no error."""

from typing import cast

import torch
from torch import nn

from tierstore import (
    ConfigError,
    TierStore,
    Tierstore,  # wrong
    offload_module,
    plan_memory,
    remove_offload,
    tiered_offload,
)


class Model(nn.Module):
    width = 8


store = TierStore("/nvme", host_bytes="8GiB", codec="zstd:3")
model = offload_module(Model(), store, device_bytes="auto")
width: int = model.width
width = remove_offload(model).width
handle = store.put(torch.ones(4))
tensor: torch.Tensor = store.get(handle)

TierStore()  # wrong
TierStore("/nvme", host_bytes=1.5)  # wrong
TierStore("/nvme", codec="zst")  # wrong
TierStore("/nvme", codec="zstd:99")  # wrong
TierStore("/nvme", host_byte="8GiB")  # wrong
TierStore("/nvme", return_memory="sometimes")  # wrong
TierStore("/nvme", "8GiB")  # wrong
TierStore.connect("/socket", disk_bytes="8GiB")  # wrong
store.put([1.0, 2.0])  # wrong
store.get(tensor)  # wrong
tiered_offload("/nvme")  # wrong
tiered_offload(store, prefetch="forward")  # wrong
offload_module(store, model)  # wrong
offload_module(model, store, hostbytes=1)  # wrong
number: str = model.width  # wrong
plan_memory(model, lambda: cast(torch.Tensor, tensor), store=store)  # wrong
raised: type[ValueError] = ConfigError
