"""Every private name of PyTorch that tierstore uses, looked up once, when tierstore is imported.

PyTorch promises nothing about these names. A release that lacks one of them is refused here, by one error that says
which are missing; otherwise the first use would fail, perhaps hours into a training. Other modules take the names from
here and never from torch (`tests/store/test_torch_names.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedTorchError

_TRIED = "2.11 to 2.15"
"""The releases of torch that were tested: docs/reference/compatibility.md."""

_missing: list[str] = []


def _torch(name: str) -> Any:
    """The object with the dotted `name`. A missing name is noted, for the error at the end of the module."""
    try:
        return reduce(getattr, name.split(".")[1:], torch)
    except AttributeError:
        _missing.append(name)
        return None


# Tensors and storages.
storage_address: Callable[[torch.Tensor], int] = _torch("torch._C._data_address")
"""The address where the tensor's storage begins, without the tensor's offset, despite torch's name for it.

Unlike `data_ptr()` it leaves a copy-on-write storage shared.
"""
storage_use_count: Callable[[int], int] = _torch("torch._C._storage_Use_Count")
tensor_use_count: Callable[[torch.Tensor], int] = _torch("torch.Tensor._use_count")
set_conj: Callable[[torch.Tensor, bool], None] = _torch("torch._C._set_conj")
set_neg: Callable[[torch.Tensor, bool], None] = _torch("torch._C._set_neg")
neg_view: Callable[[torch.Tensor], torch.Tensor] = _torch("torch._neg_view")
for _attribute in (
    "torch.Tensor._base",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
):
    _torch(_attribute)  # used on each tensor or storage

# Autograd.
sequence_nr: Callable[[], int] = _torch("torch._C._autograd._get_sequence_nr")
push_hooks: Callable[[Any, Any], None] = _torch("torch._C._autograd._push_saved_tensors_default_hooks")
pop_hooks: Callable[[], None] = _torch("torch._C._autograd._pop_saved_tensors_default_hooks")
top_hooks: Callable[[bool], tuple[Any, Any] | None] = _torch("torch._C._autograd._top_saved_tensors_default_hooks")
SavedVariable: Any = _torch("torch._C._autograd.SavedTensor")
"""A tensor that Python code has given to autograd to save."""
current_autograd_node: Callable[[], Any] = _torch("torch._C._current_autograd_node")
PythonNode: Any = _torch("torch._C._FunctionBase")
current_backward: Callable[[], int] = _torch("torch._C._current_graph_task_id")
"""The number of the backward that this thread computes; -1: none."""
keeps_graph: Callable[[], bool] = _torch("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the backward that this thread computes leaves the graph as it was."""
current_stream_on: Callable[[int], torch.Stream] = _torch("torch._C._accelerator_getStream")
"""Does what `torch.accelerator.current_stream` does, in half the time: its argument is the device's index."""
engine_run_backward: Any = _torch("torch.autograd.graph._engine_run_backward")

# Modes, and the transforms of `torch.func`.
is_function_mode_on: Callable[[], bool] = _torch("torch._C._is_torch_function_mode_enabled")
num_dispatch_modes: Callable[[], int] = _torch("torch._C._len_torch_dispatch_stack")
innermost_transform: Callable[[], object] = _torch("torch._C._functorch.peek_interpreter_stack")
InferenceMode: Any = _torch("torch._C._InferenceMode")
DisableTorchFunction: Any = _torch("torch._C.DisableTorchFunction")
ExcludeDispatchKeyGuard: Any = _torch("torch._C._ExcludeDispatchKeyGuard")
SetExcludeDispatchKeyGuard: Any = _torch("torch._C._SetExcludeDispatchKeyGuard")
is_key_excluded: Callable[[Any], bool] = _torch("torch._C._dispatch_tls_is_dispatch_key_excluded")
AD_INPLACE_OR_VIEW: Any = _torch("torch._C.DispatchKey.ADInplaceOrView")
AUTOGRAD: Any = _torch("torch._C.DispatchKey.AutogradFunctionality")
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = _torch("torch.utils._python_dispatch.TorchDispatchMode")
FakeTensor: Any = _torch("torch._subclasses.fake_tensor.FakeTensor")
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _torch("torch.utils._pytree.tree_flatten")
tree_leaves: Callable[[Any], list[Any]] = _torch("torch.utils._pytree.tree_leaves")
tree_map_only: Callable[[type, Callable[[Any], Any], Any], Any] = _torch("torch.utils._pytree.tree_map_only")
tree_unflatten: Callable[[Iterable[Any], Any], Any] = _torch("torch.utils._pytree.tree_unflatten")
DispatchKeySet: Any = _torch("torch._C.DispatchKeySet")
MODE_KEYS: tuple[Any, ...] = (
    _torch("torch._C.DispatchKey.Python"),
    _torch("torch._C.DispatchKey.PythonTLSSnapshot"),
    _torch("torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode"),
    _torch("torch._C.DispatchKey.FuncTorchDynamicLayerBackMode"),
    _torch("torch._C.DispatchKey.Functionalize"),
)

# TorchDynamo. Its C modules are attributes of their parent only after somebody has imported them.
with suppress(ImportError):
    import_module("torch._C._dynamo.eval_frame")
with suppress(ImportError):
    import_module("torch._C._dynamo.guards")
unchecked_strided: Callable[[torch.Tensor, Iterable[int], Iterable[int], int], torch.Tensor] = _torch(
    "torch._C._dynamo.guards._reinterpret_tensor"
)
"""(tensor, size, stride, further offset): a tensor over the same storage, which may be too small for it."""
get_eval_frame_callback: Callable[[], object] = _torch("torch._C._dynamo.eval_frame.get_eval_frame_callback")
set_code_exec_strategy: Callable[[Any, Any], None] = _torch("torch._C._dynamo.eval_frame.set_code_exec_strategy")
FRAME_SKIP: Any = _torch("torch._C._dynamo.eval_frame._FrameAction.SKIP")
FRAME_DEFAULT: Any = _torch("torch._C._dynamo.eval_frame._FrameAction.DEFAULT")
FrameExecStrategy: Any = _torch("torch._C._dynamo.eval_frame._FrameExecStrategy")


def import_dynamo() -> None:
    """Import TorchDynamo, which takes seconds. Many parts of PyTorch do so when they are first used."""
    import_module("torch._dynamo")


def while_tracing(function: Callable[[object], None]) -> None:
    """For code that TorchDynamo traces: it calls the function while it traces, and the traced code does not.

    `function`: a function of a module, without free variables; it is given Dynamo's context."""
    from torch._dynamo.comptime import comptime  # here, since it imports Dynamo

    comptime(function)


if _missing:
    raise UnsupportedTorchError(str(torch.__version__), tuple(_missing), _TRIED)


def name_of_node() -> str:
    """Of the operation whose gradient this thread computes; "" if it computes none."""
    node = current_autograd_node()
    return "" if node is None else str(node.name())


def is_in_own_function() -> bool:
    """Whether this thread computes the backward of a function of the user's, in Python or C++, not one of PyTorch's.

    PyTorch has a class for each of its own nodes; it shows all others of C++ as `CppFunction`
    (torch/csrc/autograd/python_cpp_function.cpp)."""
    node = current_autograd_node()
    return isinstance(node, PythonNode) or type(node).__name__ == "CppFunction"
