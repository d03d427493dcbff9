"""Which saved tensors go to the store, which stay and why, and how to look at them while the graph lives.

python examples/saved_tensors_inspection.py [PATH]    # PATH: a directory on the drive; default: /tmp
"""

from __future__ import annotations

import sys
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn

from tierstore import TierStore, tiered_offload

ROWS, WIDTH, NUM_LOOKS = 512, 256, 100


def loss_of(layer: nn.Linear, batch: torch.Tensor) -> torch.Tensor:
    """Saves tensors of every kind; those of float32 and full size take 512 KiB."""
    hidden = layer(layer(batch))  # the batch; for the second call also a view of the weight, 256 KiB
    hidden = hidden.exp() * batch  # the result of exp; and the batch again
    hidden = hidden.where(hidden > 1, 0)  # where that is: bool, 128 KiB
    hidden = hidden - hidden.logsumexp(1, keepdim=True)  # what went in, and one number for each row: 2 KiB
    return torch.sparse.mm(torch.eye(ROWS).to_sparse(), hidden.sin()).sum()  # what went in, and the sparse matrix


def show_choice(path: str, label: str, **options: Any) -> None:
    """Run it under a store with these options; print what went to disk and what stayed, by reason."""
    torch.manual_seed(0)
    layer, batch = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    with TierStore(path, host_bytes=0) as store:
        with tiered_offload(store, **options):
            loss = loss_of(layer, batch)
        store.flush()
        loss.backward()
        del loss  # and with it the graph: only now is it known what somebody else held all the time
        stats = store.stats()
    kept = ", ".join(f"{reason} {nbytes // 1024} KiB" for reason, nbytes in stats.kept_bytes.items())
    print(
        f"{label}: {stats.packed_tensors} tensors to the store, {stats.spilled_bytes // 1024} KiB spilled; kept: {kept}"
    )


def look_at_nodes(path: str) -> None:
    """Read a saved tensor through its node, again and again: it is always what was saved."""
    weight = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = (weight * 2).detach()
    with TierStore(path, host_bytes=0) as store:
        with tiered_offload(store, min_bytes=0):
            output = (weight * 2).sin()
        store.flush()
        node: Any = output.grad_fn
        print(f"on disk before anybody looks: {store.stats().disk_bytes // 1024} KiB")
        same = sum(torch.equal(node._saved_self, expected) for _ in range(NUM_LOOKS))
        print(f"looks at grad_fn._saved_self: {NUM_LOOKS}; as saved: {same}")
        print(f"read from disk for them: {store.stats().restored_bytes // 1024} KiB")
        taken = node._saved_self  # may be kept: the memory is lent, whatever becomes of the graph
        output.sum().backward()
        print(f"gradient right after the looks: {'yes' if torch.equal(weight.grad, 2 * expected.cos()) else 'no'}")
        del node, output
        print(f"without the graph: {store.stats().live_handles} handles, {store.stats().lent_bytes // 1024} KiB lent")
        del taken
        print(f"without what was taken: {store.stats().lent_bytes // 1024} KiB lent")


def main(path: str) -> None:
    """Show the choices, then the looks."""
    show_choice(path, "min_bytes=0", min_bytes=0)
    show_choice(path, "min_bytes='256KiB'", min_bytes="256KiB")
    show_choice(path, "select=torch.is_floating_point", min_bytes=0, select=torch.is_floating_point)
    look_at_nodes(path)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [gettempdir()]))
