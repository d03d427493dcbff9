"""A training whose saved tensors lie between small tensors that stay: what glibc then keeps is many times what is used.

Run as a program: directory, return_memory, and "forward" to leave out backward. Prints a line of JSON.
"""

import hashlib
import json
import re
import sys
import warnings
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload

NUM_LAYERS = 300
"""Each saves 2 MiB."""


def main(directory: str, mode: str, *options: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weight = torch.randn(256, 256, requires_grad=True)
    with (
        warnings.catch_warnings(record=True) as told,
        TierStore(directory, host_bytes=0, staging_bytes="16MiB", codec="none", return_memory=mode) as store,
    ):
        warnings.simplefilter("always")
        small, loss, hidden = [], torch.zeros(()), torch.randn(2048, 256)
        scope = tiered_offload(store, min_bytes="256KiB")
        with scope:
            for _ in range(NUM_LAYERS):
                hidden = torch.tanh(hidden @ weight)
                small.append(torch.empty(3000))
                loss = loss + hidden.mean()
        with scope:  # what is to be told is told once
            pass
        stats = store.stats()
        if "forward" not in options:
            loss.backward()
    print(
        json.dumps(
            {
                "gradients": None if weight.grad is None else hashlib.sha256(weight.grad.numpy().tobytes()).hexdigest(),
                "peak_bytes": int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024,
                "resident_bytes": stats.resident_bytes,
                "allocator_free_bytes": stats.allocator_free_bytes,
                "returned_bytes": stats.returned_bytes,
                "return_seconds": stats.return_seconds,
                "memory_return": stats.memory_return,
                "summary": stats.summary(),
                "told": [str(warning.message) for warning in told],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
