"""What an offloaded module finds around its calls: regions of `torch.utils.checkpoint`.

A checkpoint drops what its region saves, and keeps the region's inputs. Hooks of ours inside the region would be the
innermost ones, and store what the checkpoint wants dropped. So an offloaded module does not enter its scope inside a
region; it stores the region's inputs, and nothing else.

Both kinds of checkpoint are recognised by private names of `torch.utils.checkpoint` (torch 2.11 to 2.15). The
non-reentrant kind has hooks of its own on the thread. The reentrant kind runs forward without gradients, where nothing
is saved, and computes the region again within the backward of its node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tierstore.tensors.layout import outside_of_modes
from tierstore.tensors.torch_names import SavedVariable, current_autograd_node, top_hooks

from .saved import unpack
from .select import KEPT_CLASSES, attributes_of
from .thread_hooks import RemovedHooks, put_back, take_off_all

_MODULE = "torch.utils.checkpoint"
_REENTRANT_NODE = "CheckpointFunctionBackward"
_ARE_PACKED = "_tierstore_has_packed_inputs"


def is_in_checkpoint() -> bool:
    """Whether this thread runs a checkpointed region.

    A reentrant region counts only while it is recomputed. A non-reentrant one is found by its hooks, so it is missed
    where other hooks were set inside it."""
    hooks = top_hooks(False)
    return (hooks is not None and _is_of_checkpoint(hooks[0])) or _computes_again()


def pack_inputs(pack: Callable[[Any], object]) -> None:
    """Pack the inputs of the outermost region around the caller, if that runs forward and its inputs are not packed.

    Does nothing inside another library's hooks, which have seen the inputs, nor in a nested region, whose inputs the
    outer one drops.

    Raises what `pack` raises; the tensor that it was called with is then still autograd's."""
    frame = None if _computes_again() else _outermost_frame()
    if frame is None or hasattr(frame, _ARE_PACKED):
        return
    setattr(frame, _ARE_PACKED, True)
    for saved, tensor in _unchanged_inputs(frame):
        # With hooks the region gets a new tensor, without the class and the attributes that it may compute with.
        if type(tensor) is torch.Tensor and attributes_of(tensor) is None:
            with outside_of_modes(), torch.no_grad():  # modes of the region must see the same in forward and backward
                packed = pack(tensor)
                if not isinstance(packed, KEPT_CLASSES):
                    saved.register_hooks(partial(_given, packed), unpack)


def _given(packed: object, _: torch.Tensor) -> object:
    return packed


def _computes_again() -> bool:
    node = current_autograd_node()
    return node is not None and node.name() == _REENTRANT_NODE


def _outermost_frame() -> Any:
    removed: RemovedHooks = []
    try:
        take_off_all(removed)
        pack = removed[-1][0]
    finally:
        put_back(removed)
    names = pack.__code__.co_freevars if _is_of_checkpoint(pack) else ()
    return pack.__closure__[names.index("frame")].cell_contents if "frame" in names else None


def _is_of_checkpoint(pack: object) -> bool:
    return getattr(pack, "__module__", None) == _MODULE


def _unchanged_inputs(frame: Any) -> list[tuple[Any, torch.Tensor]]:
    """What the checkpoint has saved of a region's inputs, each with the tensor. None, if one was changed since.

    PyTorch itself tells of a change in place, in backward. The frame has a list of the inputs from torch 2.13 on.
    Before that, the node of an operator has them. With a torch that has neither, the inputs stay where they are."""
    try:
        if hasattr(frame, "saved_args"):
            return [(saved, saved.unpack()) for saved in frame.saved_args if isinstance(saved, SavedVariable)]
        node = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
        return [] if node is None else list(zip(node._raw_saved_tensors, node.saved_tensors, strict=True))
    except RuntimeError:
        return []
