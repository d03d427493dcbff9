"""The private names of PyTorch's compilers, which only `offload_backend` needs. It looks them up when it is made.

To import the compilers takes seconds, and they have these names from torch 2.13 on. So they are not among those without
which nothing can be imported (`torch_names.py`)."""

from __future__ import annotations

from functools import cache, reduce
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import UnsupportedTorchError

_OLDEST = "2.13"
_TRIED = "2.13"

_OF_AOT_AUTOGRAD = {
    "aot_autograd": "torch._dynamo.backends.common:aot_autograd",
    "boxed_nop": "torch._dynamo.backends.debugging:boxed_nop",
    "min_cut_partition": "torch._functorch.partitioners:min_cut_rematerialization_partition",
}
_OF_INDUCTOR = {
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "list_mode_options": "torch._inductor:list_mode_options",
    "config": "torch._inductor:config",
    "custom_partitioner": "torch._inductor.config:custom_partitioner_fn",
    "pre_fusion_pass": "torch._inductor.config:_pre_fusion_custom_pass",
    "post_fusion_pass": "torch._inductor.config:_post_fusion_custom_pass",
    "CustomPartitioner": "torch._inductor.custom_graph_pass:CustomPartitionerFn",
    "CustomSchedulerPass": "torch._inductor.custom_graph_pass:CustomSchedulerPass",
    "files_hash": "torch._inductor.custom_graph_pass:get_hash_for_files",
    "FixedLayout": "torch._inductor.ir:FixedLayout",
    "FlexibleLayout": "torch._inductor.ir:FlexibleLayout",
    "StorageBox": "torch._inductor.ir:StorageBox",
    "TensorBox": "torch._inductor.ir:TensorBox",
    "Buffer": "torch._inductor.ir:Buffer",
    "WeakDep": "torch._inductor.dependencies:WeakDep",
    "copy_input": "torch._inductor.ir:ExternKernel.copy_input",
    "register_lowering": "torch._inductor.lowering:register_lowering",
    "fallback_handler": "torch._inductor.lowering:fallback_handler",
    "graph": "torch._inductor.virtualized:V",
}


@cache
def compiler_names(*, inductor: bool) -> SimpleNamespace:
    """The names of AOTAutograd and, on demand, of Inductor, as attributes.

    Raises UnsupportedTorchError, which tells all that are missing, also for a release before the first one that was
    tried: what has these names there may do something else."""
    version = str(torch.__version__)
    if torch.__version__ < _OLDEST:  # a `TorchVersion`
        raise UnsupportedTorchError(version, (), _TRIED, "offload_backend")
    found: dict[str, Any] = {}
    missing: list[str] = []
    for ours, name in (_OF_AOT_AUTOGRAD | (_OF_INDUCTOR if inductor else {})).items():
        module, _, path = name.partition(":")
        try:
            found[ours] = reduce(getattr, path.split("."), import_module(module))
        except (ImportError, AttributeError):
            missing.append(f"{module}.{path}")
    if missing:
        raise UnsupportedTorchError(version, tuple(missing), _TRIED, "offload_backend")
    return SimpleNamespace(**found)
