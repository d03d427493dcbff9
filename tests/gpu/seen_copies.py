"""A copy engine whose copies PyTorch's record of streams sees, and which can be made to forget a wait."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tierstore.tensors.copies import AcceleratorCopies, Copies, Marker
from tierstore.tensors.layout import _MODES

__all__ = ["SeenCopies", "WithoutWaits"]


class SeenCopies:
    """Around a copy engine: the mode sees what is copied, though the store works outside of all modes."""

    def __init__(self, copies: Copies, mode: TorchDispatchMode) -> None:
        self._copies = copies
        self._mode = mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Any) -> Marker:
        with self._seen():
            return self._copies.copy_out_many(sources, targets, stream)

    def copy_in_many(
        self, sources: Sequence[torch.Tensor], device: torch.device, stream: Any, ready: Marker | None
    ) -> tuple[Sequence[torch.Tensor], Marker]:
        with self._seen():
            return self._copies.copy_in_many(sources, device, stream, ready)

    @contextmanager
    def _seen(self) -> Iterator[None]:
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set() - _MODES  # what `outside_of_modes` has shut out
        is_entered = self._mode in _get_current_dispatch_mode_stack()
        with torch._C._ForceDispatchKeyGuard(included, excluded), nullcontext() if is_entered else self._mode:
            yield


class WithoutWaits(AcceleratorCopies):
    """An engine whose user is told of the end of each copy, and does not wait for it."""

    def wait(self, stream: torch.Stream, marker: Marker) -> None:
        """Nothing."""
