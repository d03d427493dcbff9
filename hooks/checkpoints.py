"""What an offloaded module finds around its calls: regions of `torch.utils.checkpoint`.

A checkpoint drops what its region saves, and keeps the region's inputs. Hooks of ours inside the region would be the
innermost ones, so they would store what the checkpoint wants dropped. So a module of `offload_module` does not enter
its scope inside a region. It stores the region's inputs, and nothing else.

The two kinds of checkpoint are recognised by private names of `torch.utils.checkpoint` (torch 2.11 to 2.15). The
non-reentrant kind has hooks of its own on the thread. The reentrant kind runs forward without gradients, where nothing
is saved, and computes the region again within the backward of its node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierstore.residency.torch_names import current_autograd_node, top_hooks

from .thread_hooks import RemovedHooks, put_back, take_off_all, unpack

__all__ = ["is_in_checkpoint", "pack_inputs"]

_MODULE = "torch.utils.checkpoint"
_REENTRANT_NODE = "CheckpointFunctionBackward"
_ARE_PACKED = "_tierstore_has_packed_inputs"


def is_in_checkpoint() -> bool:
    """Whether this thread is inside a checkpointed region, in forward or to compute it again.

    A reentrant region is seen only in the second case. A non-reentrant one is not seen from within other hooks, which
    are then the innermost.
    """
    hooks = top_hooks(False)
    return (hooks is not None and _is_of_checkpoint(hooks[0])) or _computes_again()


def pack_inputs(pack: Callable[[Any], object]) -> None:
    """Pack the inputs of the outermost region around the caller, if that runs forward and its inputs are not packed.

    Nothing is to be done inside of hooks of others: those have seen the inputs. Nor where regions are nested: the outer
    one drops the inputs of the inner one.

    Raises what `pack` raises; the tensor that it was called with is then still autograd's.
    """
    frame = None if _computes_again() else _outermost_frame()
    if frame is None or hasattr(frame, _ARE_PACKED):
        return
    setattr(frame, _ARE_PACKED, True)
    for saved in _unchanged_inputs(frame):
        saved.register_hooks(pack, unpack)


def _computes_again() -> bool:
    """Whether a backward runs here that computes a reentrant region again."""
    node = current_autograd_node()
    return node is not None and node.name() == _REENTRANT_NODE


def _outermost_frame() -> Any:
    """The `_CheckpointFrame` of the outermost hooks; None: those are not of a region that runs forward."""
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


def _unchanged_inputs(frame: Any) -> list[Any]:
    """The saved tensors of a region's inputs that are as they were saved.

    Others are left alone, so that PyTorch itself tells in backward of the change in place. A list in the frame has them
    from torch 2.13 on; before, the node of an operator has, which tells of a change in any of them alike.
    """
    if hasattr(frame, "saved_args"):
        inputs = [saved for saved in frame.saved_args if hasattr(saved, "register_hooks")]
        return [saved for saved in inputs if _succeeds(saved.unpack)]
    node = frame.input_saver.grad_fn
    return list(node._raw_saved_tensors) if _succeeds(lambda: node.saved_tensors) else []


def _succeeds(unpack_plainly: Callable[[], object]) -> bool:
    """Whether PyTorch unpacks what it has saved, without hooks, and finds no change in place."""
    try:
        unpack_plainly()
    except RuntimeError:
        return False
    return True
