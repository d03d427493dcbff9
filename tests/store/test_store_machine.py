"""The store against a dict: whatever is done, in whatever order, what comes back is what went in."""

import gc
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tierstore import Handle, ModifiedInPlaceError, StoreClosedError, TierStore

SIZES = st.sampled_from([0, 1, 2, 7, 255, 1000, 1024, 1025, 3000, 9001])
BUDGETS = st.sampled_from([0, 1, 4000, 4096, 12_004, 30_000])
LARGEST_BYTES = 9001 * 4


def _content(size: int, number: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32) * 31 + number


class Stored:
    """What the model knows of one handle."""

    def __init__(self, handle: Handle, original: torch.Tensor | None, content: torch.Tensor) -> None:
        self.handle = handle
        self.original = original
        self.content = content
        self.is_changed = False


class StoreMachine(RuleBasedStateMachine):
    stored = Bundle("stored")
    results = Bundle("results")

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._number = 0
        self._live: dict[int, Stored] = {}
        self._changed: set[int] = set()
        self._lost: list[Handle] = []
        self._store: TierStore

    @initialize(host_bytes=BUDGETS, staging_bytes=BUDGETS, codec=st.sampled_from(["none", "auto", "zstd"]))
    def open(self, host_bytes: int, staging_bytes: int, codec: str) -> None:
        self._host_bytes, self._staging_bytes = host_bytes, staging_bytes
        self._store = TierStore(
            self._folder.name,
            host_bytes=host_bytes,
            staging_bytes=staging_bytes,
            disk_bytes="4MiB",
            inline_bytes=4096,
            codec=codec,
        )

    @rule(target=stored, size=SIZES, is_kept=st.booleans(), is_transposed=st.booleans())
    def put(self, size: int, is_kept: bool, is_transposed: bool) -> int:
        self._number += 1
        tensor = _content(size, self._number)
        if is_transposed:
            tensor = tensor[: size // 2 * 2].reshape(-1, 2).t()
        handle = self._store.put(tensor)
        self._live[self._number] = Stored(handle, tensor if is_kept else None, tensor.clone())
        return self._number

    @rule(target=results, number=stored)
    def get(self, number: int) -> object:
        stored = self._live.get(number)
        if stored is None:
            return multiple()
        try:
            result = self._store.get(stored.handle)
        except ModifiedInPlaceError:
            assert stored.is_changed
            return multiple()
        assert not stored.is_changed
        assert result.dtype == torch.int32
        assert torch.equal(result, stored.content)
        return number, result

    @rule(result=consumes(results))
    def drop_result(self, result: tuple[int, torch.Tensor]) -> None:
        number, tensor = result
        if number not in self._changed:
            assert tensor.numel() == 0 or (tensor.flatten()[0] - number) % 31 == 0

    @rule(result=results)
    def change_result(self, result: tuple[int, torch.Tensor]) -> None:
        number, tensor = result
        if number in self._live and tensor.numel():
            tensor.add_(0)  # the bytes are the same, but who is to know
            self._note_change(number)

    @rule(number=stored)
    def change_original(self, number: int) -> None:
        stored = self._live.get(number)
        if stored is not None and stored.original is not None:
            stored.original.zero_()
            self._note_change(number)

    @rule(number=stored)
    def forget_original(self, number: int) -> None:
        if number in self._live:
            self._live[number].original = None

    @rule(number=consumes(stored))
    def drop(self, number: int) -> None:
        self._live.pop(number, None)

    @rule(numbers=st.lists(stored, max_size=6))
    def prefetch(self, numbers: list[int]) -> None:
        self._store.prefetch([self._live[number].handle for number in numbers if number in self._live])

    @rule()
    def flush(self) -> None:
        self._store.flush()

    @rule()
    def collect(self) -> None:
        gc.collect(0)

    @rule()
    def close_and_reopen(self) -> None:
        self._store.close()
        self._store.close()
        for stored in self._live.values():
            try:
                self._store.get(stored.handle)
            except StoreClosedError:
                continue
            except ModifiedInPlaceError:
                assert stored.is_changed
                continue
            raise AssertionError("a closed store answered")
        self._lost = [stored.handle for stored in self._live.values()]  # they die later, or never
        self._live.clear()
        stats = self._store.stats()
        assert (stats.host_bytes, stats.staging_used_bytes, stats.disk_bytes) == (0, 0, 0)
        self.open(self._host_bytes, self._staging_bytes, "none")

    @invariant()
    def holds_no_more_than_it_may(self) -> None:
        if not hasattr(self, "_store"):
            return
        stats = self._store.stats()
        assert stats.live_handles == len(self._live)
        assert 0 <= stats.host_bytes <= stats.host_bytes_peak <= self._host_bytes
        assert 0 <= stats.staging_used_bytes <= self._staging_bytes + 2 * LARGEST_BYTES
        assert 0 <= stats.disk_bytes <= stats.disk_bytes_peak <= 4 * 2**20
        assert stats.lent_bytes >= 0
        assert stats.written_bytes >= stats.spilled_bytes or stats.codec_choices
        assert stats.packed_tensors >= len(self._live)
        assert min(stats.restored_bytes, stats.read_bytes, stats.cancelled_bytes, stats.forwarded_bytes) >= 0

    def _note_change(self, number: int) -> None:
        self._live[number].is_changed = True
        self._changed.add(number)  # results may share the memory, and may outlive the handle

    def teardown(self) -> None:
        with self._folder:
            self._end()

    def _end(self) -> None:
        if hasattr(self, "_store"):
            while self._live:
                _, stored = self._live.popitem()
                if not stored.is_changed:
                    assert torch.equal(self._store.get(stored.handle), stored.content)
                del stored
            self._lost.clear()
            self._store.flush()
            stats = self._store.stats()
            assert (stats.live_handles, stats.host_bytes, stats.staging_used_bytes) == (0, 0, 0)
            self._store.close()
        assert list(Path(self._folder.name).iterdir()) == []


StoreMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class TestStoreMachine(StoreMachine.TestCase):
    """As pytest wants it."""
