"""Every function that PyTorch leaves to MKL has been called by one thread before a training begins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.demo import DemoSettings
from tierstore.demo.vector_math import choose_vector_kernels
from tierstore.demo.worker import prepare


class _Calls(TorchDispatchMode):
    """Which functions were called on a single element, with which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.seen.add((func.overloadpacket.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def _left_to_mkl() -> set[tuple[str, torch.dtype]]:
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    names = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", header.read_text(), re.MULTILINE)
    assert names, "PyTorch's header reads otherwise now"
    return {(name, dtype) for name in names for dtype in (torch.float32, torch.float64)}


def test_choose_vector_kernels_calls_all_that_pytorch_leaves_to_mkl() -> None:
    with _Calls() as calls:
        choose_vector_kernels()
    assert _left_to_mkl() <= calls.seen


def test_demo_chooses_kernels_before_it_trains() -> None:
    with _Calls() as calls:
        prepare(DemoSettings(steps=1, layers=1, width=64, context=16, batch=1), torch.device("cpu"))
    assert _left_to_mkl() <= calls.seen
