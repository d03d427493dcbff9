"""What every disk tier must do. A tier's test class inherits `DiskConformance` and gives it a fixture `tier`."""

import asyncio
import random
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from tierstore.disk.tier import DiskTier, Kind
from tierstore.errors import StoreClosedError, StoreFullError

T = TypeVar("T")
PLAIN = Kind("float32", 4, "MulBackward0")


def random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + num_bytes).randbytes(num_bytes)


def at_phase(content: bytes, phase: int) -> memoryview:
    """The content in memory whose address is `phase` modulo 4096; writable."""
    from tierstore.disk.linux import address_of

    memory = memoryview(bytearray(len(content) + 2 * 4096))
    start = (phase - address_of(memory)) % 4096
    view = memory[start : start + len(content)]
    view[:] = content
    return view


async def read_back(tier: DiskTier, key: int, num_bytes: int, phase: int = 0) -> bytes:
    destination = at_phase(b"\xa5" * num_bytes, phase)
    await tier.read(key, destination)
    return bytes(destination)


async def gather(*awaitables: Awaitable[T]) -> list[T]:
    return list(await asyncio.gather(*awaitables))


class DiskConformance:
    """Inherit, and define the fixture `tier`: an empty one of >= 64 MiB."""

    sizes = (0, 1, 511, 512, 513, 4095, 4096, 4097, 65_535, 65_536, 65_537, 524_288, 524_289, 3 * 2**20 + 77)

    async def test_write_every_size_reads_the_same_bytes(self, tier: DiskTier) -> None:
        contents = {key: random_bytes(size) for key, size in enumerate(self.sizes)}
        await gather(*(tier.write(key, memoryview(c), PLAIN) for key, c in contents.items()))
        assert tier.usage().num_records == len(contents)
        for key, content in contents.items():
            assert await read_back(tier, key, len(content)) == content

    @pytest.mark.parametrize("size", [1000, 65_537, 3 * 2**20 + 77])
    async def test_confirms_only_the_bytes_of_the_record(self, tier: DiskTier, size: int) -> None:
        content = bytearray(random_bytes(size))
        await tier.write(1, memoryview(bytes(content)), PLAIN)
        await tier.write(2, memoryview(random_bytes(size, seed=1)), PLAIN)
        assert tier.confirms(1, memoryview(content))
        assert not tier.confirms(1, memoryview(content)[:-1])
        assert not tier.confirms(2, memoryview(content))
        changed = content[:-1] + bytes([content[-1] ^ 1])
        assert not tier.confirms(1, memoryview(changed))
        await tier.discard([1])
        assert not tier.confirms(1, memoryview(content))

    @pytest.mark.parametrize("source_phase", [0, 1, 64, 511, 512, 4032, 4095])
    async def test_write_any_address_reads_into_any_address(self, tier: DiskTier, source_phase: int) -> None:
        content = random_bytes(2 * 2**20 + 4099)
        await tier.write(1, at_phase(content, source_phase).toreadonly(), PLAIN)
        for phase in (source_phase, (source_phase + 512) % 4096, (source_phase + 7) % 4096, 0):
            assert await read_back(tier, 1, len(content), phase) == content

    async def test_write_compressible_reads_the_same_bytes(self, tier: DiskTier) -> None:
        for key, size in enumerate(self.sizes):
            content = (b"\x00\x00\x80\x3f" + bytes([key, 0, 0, 0])) * (size // 8 + 1)
            receipt = await tier.write(key, memoryview(content)[:size], PLAIN)
            assert receipt.stored_bytes >= 0
            assert await read_back(tier, key, size) == content[:size]

    async def test_read_unknown_or_wrong_length_is_refused(self, tier: DiskTier) -> None:
        await tier.write(1, memoryview(bytes(100)), PLAIN)
        with pytest.raises(KeyError):
            await tier.read(2, memoryview(bytearray(100)))
        with pytest.raises(ValueError, match="100"):
            await tier.read(1, memoryview(bytearray(101)))

    async def test_discard_frees_and_forgets(self, tier: DiskTier) -> None:
        await gather(*(tier.write(key, memoryview(bytes(70_000)), PLAIN) for key in range(5)))
        assert tier.usage().disk_bytes > 0
        await tier.discard(list(range(5)))
        usage = tier.usage()
        assert (usage.disk_bytes, usage.num_records) == (0, 0)
        with pytest.raises(KeyError):
            await tier.discard([3])

    async def test_discard_with_an_unknown_key_frees_nothing(self, tier: DiskTier) -> None:
        await tier.write(1, memoryview(b"kept"), PLAIN)
        with pytest.raises(KeyError):
            await tier.discard([1, 2])
        assert await read_back(tier, 1, 4) == b"kept"

    async def test_full_budget_raises_and_goes_on_after_discard(self, tier: DiskTier) -> None:
        budget = tier.usage().budget_bytes
        contents: dict[int, bytes] = {}

        async def fill() -> None:
            while True:
                content = random_bytes(4 * 2**20 + 4096, seed=len(contents))
                await tier.write(len(contents), memoryview(content), PLAIN)
                contents[len(contents)] = content

        with pytest.raises(StoreFullError) as caught:
            await fill()
        assert caught.value.needed_bytes == 4 * 2**20 + 4096
        assert caught.value.disk_budget_bytes == budget
        assert budget * 3 // 4 <= tier.usage().disk_bytes <= budget
        for key, content in contents.items():
            assert await read_back(tier, key, len(content)) == content
        await tier.discard([0, 1])
        await tier.write(1000, memoryview(contents[0]), PLAIN)
        assert await read_back(tier, 1000, len(contents[0])) == contents[0]

    async def test_longer_than_the_budget_is_refused(self, tier: DiskTier) -> None:
        content = random_bytes(tier.usage().budget_bytes + 4096)
        with pytest.raises(StoreFullError):
            await tier.write(1, memoryview(content), PLAIN)
        assert tier.usage().disk_bytes == 0
        assert tier.usage().num_records == 0

    async def test_waits_for_a_discard_in_flight_instead_of_failing(self, tier: DiskTier) -> None:
        half = random_bytes(tier.usage().budget_bytes // 2 + 4096)
        await tier.write(1, memoryview(half), PLAIN)
        discarding = asyncio.ensure_future(tier.discard([1]))
        await asyncio.sleep(0)
        await tier.write(2, memoryview(half), PLAIN)
        await discarding
        assert await read_back(tier, 2, len(half)) == half

    async def test_many_in_flight_match_a_dict(self, tier: DiskTier) -> None:
        async def worker(tier: DiskTier, number: int) -> None:
            steps, model = random.Random(number), dict[int, bytes]()
            for step in range(60):
                key = number * 1000 + step
                action = steps.random()
                if action < 0.5 or not model:
                    size = int(2 ** steps.uniform(0, 19))
                    content = random_bytes(size, seed=key) if steps.random() < 0.5 else bytes([step]) * size
                    await tier.write(key, at_phase(content, steps.randrange(4096)), PLAIN)
                    model[key] = content
                elif action < 0.8:
                    key = steps.choice(list(model))
                    phase = steps.randrange(4096)
                    assert await read_back(tier, key, len(model[key]), phase) == model[key]
                else:
                    key = steps.choice(list(model))
                    del model[key]
                    await tier.discard([key])
            for key, content in model.items():
                assert await read_back(tier, key, len(content)) == content
            await tier.discard(list(model))

        await gather(*(worker(tier, number) for number in range(8)))
        usage = tier.usage()
        assert (usage.num_records, usage.disk_bytes) == (0, 0)

    async def test_space_is_reused_over_a_thousand_steps(self, tier: DiskTier) -> None:
        """Half the budget is in use, sizes change all the time, nothing is ever refused."""

        steps, live = random.Random(5), dict[int, int]()
        half, content = tier.usage().budget_bytes // 2, memoryview(random_bytes(2**20))
        for key in range(1000):
            size = int(2 ** steps.uniform(12, 20 if key % 400 < 200 else 17))
            while sum(live.values()) + size > half:
                victim = steps.choice(list(live))
                del live[victim]
                await tier.discard([victim])
            await tier.write(key, content[:size], PLAIN)
            live[key] = size
        usage = tier.usage()
        assert usage.num_records == len(live)
        assert usage.allocated_bytes <= usage.budget_bytes * 5 // 4

    async def test_close_is_idempotent_and_final(self, tier: DiskTier) -> None:
        await tier.write(1, memoryview(b"x"), PLAIN)
        await tier.close()
        await tier.close()
        with pytest.raises(StoreClosedError):
            await tier.write(2, memoryview(b"x"), PLAIN)
        with pytest.raises(StoreClosedError):
            await tier.read(1, memoryview(bytearray(1)))
        with pytest.raises(StoreClosedError):
            await tier.discard([1])
