"""The accelerator path beside compilers, captured graphs, and PyTorch's own checker of streams."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.gpu.device import DEVICE, NEEDS_DEVICE
from tierstore import offload_module, tiered_offload

pytestmark = NEEDS_DEVICE

ROOT = Path(__file__).parents[2]


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))).to(DEVICE)


def _gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("default")  # torch's compiler warns of what it does itself
def test_compiled_block_by_block_same_bits(make_store: MakeStore) -> None:
    batch = torch.randn(512, 256, device=DEVICE)
    compiled = [torch.compile(block) for block in _blocks()]
    expected = _gradients(nn.Sequential(*compiled), batch)
    store = make_store(host_bytes="1GiB")
    offloading = nn.Sequential(*(offload_module(block, store=store, min_bytes=0) for block in compiled))
    for _ in range(2):
        found = _gradients(offloading, batch)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert store.stats().offloaded_bytes > 0


def test_forward_and_backward_captured_as_a_graph_everything_stays(make_store: MakeStore) -> None:
    store = make_store(host_bytes="1GiB")
    model, batch = _blocks(), torch.randn(512, 256, device=DEVICE)
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        for _ in range(3):
            with tiered_offload(store, min_bytes=0):
                loss = model(batch).square().mean()
            loss.backward()
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    del loss  # its graph would keep the leaves' nodes, which belong to that stream
    store.flush()
    torch.cuda.synchronize()
    expected = _gradients(model, batch)
    offloaded_bytes = store.stats().offloaded_bytes
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with tiered_offload(store, min_bytes=0):
            loss = model(batch).square().mean()
        loss.backward()
    graph.replay()
    torch.cuda.synchronize()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    stats = store.stats()
    assert stats.offloaded_bytes == offloaded_bytes
    assert stats.kept_bytes["unsupported"] > 0


def test_offloaded_tensor_asked_for_in_a_capture_raises_and_is_there_afterwards(make_store: MakeStore) -> None:
    store = make_store(host_bytes="1GiB")
    content = torch.arange(2**20, device=DEVICE)
    handle = store.put(content.clone())
    store.flush()
    torch.cuda.synchronize()
    store.stats()  # the copy out is over, and the block is let go

    def ask_while_capturing() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            content.add_(0)
            store.get(handle)

    with pytest.raises(RuntimeError, match="captured as a graph"):
        ask_while_capturing()
    torch.cuda.synchronize()
    assert torch.equal(store.get(handle), content)


def _under_the_sanitizer(*choice: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """test_streams.py once more, under PyTorch's own record of who waits for whom."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_streams.py", *choice],
        cwd=ROOT,
        env=outside | {"TORCH_CUDA_SANITIZER": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_sanitizer_of_streams_finds_nothing() -> None:
    done = _under_the_sanitizer("-k", "not wait_that_is_missing")
    assert done.returncode == 0, done.stdout[-4000:]


def test_sanitizer_of_streams_finds_a_wait_that_is_missing() -> None:
    """Else it would not see the store's copies at all."""
    done = _under_the_sanitizer("-k", "test_stream_that_is_late and compute", TIERSTORE_WITHOUT_WAITS="1")
    assert done.returncode == 1, done.stdout[-4000:]
    assert "CUDASanitizerErrors" in done.stdout, done.stdout[-4000:]
