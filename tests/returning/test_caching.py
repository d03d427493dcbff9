"""The caching allocator in real processes: whose memory it serves, what becomes of it, and who gets it instead."""

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.cgroups import entering, made_cgroup
from tests.daemon.conftest import environment_of_tests
from tests.forked import forking
from tests.processes import python
from tierstore.returning import caching

LIBRARY = caching.library_for(torch.__version__)
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=f"the caching allocator is not there: {LIBRARY}")
MIB = 2**20

BEGIN = """
import ctypes, gc, json, os, resource, sys, threading
import torch
from tierstore.returning.caching import CachingAllocator, caching_allocator

def make(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)

def mib(name):
    return getattr(cache.figures(), name) // 2**20

cache = caching_allocator(torch.__version__, make)
assert isinstance(cache, CachingAllocator), cache
"""


OutputOf = Callable[[str], str]


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutputOf]:
    """As `output_of`, in a forked child."""
    with forking(
        "import torch", tmp_path_factory.mktemp("forked"), environment=environment_of_tests(LD_PRELOAD="")
    ) as run:

        def output_of_forked(program: str) -> str:
            done = run(BEGIN + textwrap.dedent(program))
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        yield output_of_forked


def output_of(program: str, *before: str, begin: str = BEGIN, **variables: str) -> str:
    """In a process of its own."""
    program = begin + textwrap.dedent(program)
    return processes.output_of(program, before=before, LD_PRELOAD="", **variables).strip()


def test_freed_blocks_are_used_again_and_small_ones_are_left_to_others(forked: OutputOf) -> None:
    program = """
        large = make(8 * 2**20)
        print(mib("used_bytes"), mib("fresh_bytes"), large.data_ptr() % 4096)
        small = make(2**17)
        print(mib("used_bytes"))
        del large, small
        print(mib("used_bytes"), mib("idle_bytes"))
        parts = [make(2**20) for _ in range(8)]
        whole = make(2**20)
        print(mib("used_bytes"), mib("fresh_bytes"))
    """
    assert forked(program).splitlines() == ["8 8 0", "8", "0 8", "9 10"]


def test_pages_move_to_where_a_longer_block_needs_them() -> None:
    program = """
        parts = [make(6 * 2**20) for _ in range(4)]
        for part in parts:
            part.fill_(1)
        del part, parts[1], parts[1:]  # the second, then the others but the first
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        longer = make(17 * 2**20)
        longer.fill_(2)
        print(mib("fresh_bytes"), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 100)
    """
    assert output_of(program) == "24 True"


THREADS = """
import random

def work(seed):
    numbers, mine = random.Random(seed), []
    for step in range(400):
        if mine and numbers.random() < 0.5:
            block, value = mine.pop(numbers.randrange(len(mine)))
            assert bool((block == value).all()), "its bytes are another's"
        else:
            value = numbers.randrange(256)
            mine.append((torch.full((numbers.randrange(2**18, 2**22),), value, dtype=torch.uint8), value))
        if len(mine) > 12:
            mine.pop(0)
    for block, value in mine:
        assert bool((block == value).all()), "its bytes are another's"

torch.set_num_threads(1)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
gc.collect()
print(cache.figures().used_bytes)
"""


def test_threads_get_blocks_of_their_own(forked: OutputOf) -> None:
    assert forked("import warnings\nwarnings.simplefilter('error')\n" + THREADS) == "0"


def test_threads_within_a_limit_get_blocks_of_their_own() -> None:
    with made_cgroup("memory", memory__limit_in_bytes=700 * MIB) as cgroup:
        assert output_of(THREADS, *entering(cgroup)) == "0"


def test_everything_that_takes_hold_of_a_tensor_s_memory_works(tmp_path: Path, forked: OutputOf) -> None:
    program = f"""
        import numpy as np
        tensor = torch.arange(2**20, dtype=torch.float32)
        tensor.untyped_storage().resize_(2**23)
        array = tensor.numpy()
        assert torch.equal(tensor, torch.arange(2**20, dtype=torch.float32))
        del tensor
        other = torch.from_dlpack(torch.arange(2**20, dtype=torch.float32).__dlpack__())
        assert float(other[-1]) == 2**20 - 1
        torch.save(other, {str(tmp_path / "tensor.pt")!r})
        assert torch.equal(torch.load({str(tmp_path / "tensor.pt")!r}), other)
        shared = other.clone().share_memory_()
        assert torch.equal(shared, other)
        wrapped = torch.from_numpy(np.arange(2**20))
        assert int(wrapped.sum()) == sum(range(2**20))
        grown = torch.empty(2**18, dtype=torch.uint8).fill_(7)
        grown.resize_(2**22)
        assert bool((grown[:2**18] == 7).all())
        del array, other, shared, wrapped, grown
        gc.collect()
        print(cache.figures().used_bytes)
    """
    assert forked(program) == "0"


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow), "spawn"])
def test_workers_of_a_loader_send_whole_batches(tmp_path: Path, method: str) -> None:
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "from tierstore.returning.caching import CachingAllocator, caching_allocator\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 8\n"
        "    def __getitem__(self, number):\n"
        "        return torch.full((2**18,), float(number))\n"
        "if __name__ == '__main__':\n"
        "    cache = caching_allocator(torch.__version__, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))\n"
        "    assert isinstance(cache, CachingAllocator)\n"
        "    kept = torch.ones(2**22)\n"
        f"    loader = torch.utils.data.DataLoader(Data(), 2, num_workers=2, multiprocessing_context={method!r})\n"
        "    print([float(batch.double().mean()) for batch in loader], bool((kept == 1).all()))\n"
    )
    done = python(tmp_path / "program.py")
    assert done.stdout.strip() == "[0.5, 2.5, 4.5, 6.5] True", done.stderr


def test_forked_child_drops_what_no_block_uses_and_leaves_its_parent_s_alone(forked: OutputOf) -> None:
    program = """
        torch.set_num_threads(1)  # OpenMP's threads are not in the child
        kept, freed = make(2**22).fill_(1), make(64 * 2**20).fill_(2)
        del freed
        child = os.fork()
        if not child:
            before = mib("idle_bytes")
            mine = make(2**23).fill_(3)
            os._exit(0 if (before, bool((kept == 1).all()), mib("used_bytes")) == (0, True, 12) else 1)
        assert os.waitpid(child, 0)[1] == 0
        print(mib("idle_bytes"), bool((kept == 1).all()))
    """
    assert forked(program) == "64 True"


def test_profiler_of_torch_sees_its_blocks(forked: OutputOf) -> None:
    program = """
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            torch.ones(2**20)
        print(sum(event.self_cpu_memory_usage for event in seen.key_averages()) // 2**20)
    """
    assert forked(program) == "0", "as many bytes were freed"
    assert forked(program.replace("torch.ones(2**20)", "kept = torch.ones(2**20)")) == "4"


def test_memray_sees_a_whole_run(tmp_path: Path) -> None:
    pytest.importorskip("memray")
    (tmp_path / "program.py").write_text(
        BEGIN + "\nfor _ in range(50):\n    make(2**22).fill_(1)\nprint(mib('used_bytes'))\n"
    )
    done = python("-m", "memray", "run", "--native", "-o", tmp_path / "run.bin", tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    assert "\n0\n" in done.stdout
    told = python("-m", "memray", "stats", tmp_path / "run.bin")
    assert "Total allocations" in told.stdout, told.stderr


def test_limit_on_addresses_leaves_room_for_others() -> None:
    """`ulimit -v`: the region takes half of what is left, or there is none; either way a training goes on."""
    program = """
        blocks = [make(2**22).fill_(1) for _ in range(20)]
        print(all(bool((block == 1).all()) for block in blocks))
    """
    for mib in (3000, 8000):
        assert output_of(program, "sh", "-c", f'ulimit -v {mib * 1024}; exec "$@"', "sh") == "True"


def test_always_keeps_a_budget_and_never_keeps_all(forked: OutputOf) -> None:
    program = """
        for mode in ("always", "never", "auto"):
            cache.ask("store", (mode, None))
            blocks = [make(2**23).fill_(1) for _ in range(16)]
            del blocks
            print(mode, mib("idle_bytes"))
        cache.ask("other", ("always", None))
        del make(2**23)[0]
        print(mib("idle_bytes"))
    """.replace("del make(2**23)[0]", "block = make(2**23); del block")
    assert forked(program).splitlines() == ["always 32", "never 128", "auto 128", "32"]


def test_own_limit_is_kept_by_what_nobody_uses(forked: OutputOf) -> None:
    """That of a memory plan: the kernel knows nothing of it, so free pages really go."""
    program = """
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        start = resident()
        cache.ask("plan", ("auto", start + 160 * 2**20))
        most = 0
        for size in (100, 60, 90, 110, 30, 100):
            blocks = [make(10 * 2**20).fill_(1) for _ in range(size // 10)]
            most = max(most, resident() - start)
            del blocks
        buffer = bytearray(64 * 2**20)
        cache.make_room(0)
        print(most // 2**20 <= 125, (resident() - start) // 2**20 <= 165, mib("returned_bytes") > 0)
    """
    assert forked(program) == "True True True"


def test_pages_freed_beside_blocks_are_given_back_as_often_as_room_is_short(forked: OutputOf) -> None:
    program = """
        blocks = [make(2**20).fill_(1) for _ in range(128)]
        resident = int(open("/proc/self/statm").read().split()[1]) * 4096
        cache.ask("plan", ("auto", resident + 24 * 2**20))
        cache.make_room(2**22)  # nothing is free yet
        del blocks[::2]
        cache.make_room(40 * 2**20)
        print(mib("idle_bytes"), mib("returned_bytes") >= 40)
    """
    assert forked(program) == "0 True"


def test_limit_of_a_group_with_a_long_name_is_kept(tmp_path: Path, forked: OutputOf) -> None:
    """That of a container of Kubernetes has 205 characters, seen from the host."""
    group = tmp_path / ("kubepods-burstable-pod" + "0" * 180) / ("cri-containerd-" + "0" * 180)
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(2**30))
    (group / "memory.current").write_text(str(2**30 - 2**24))
    (group / "memory.stat").write_text("inactive_file 0\nfile 0\nshmem 0\n")
    program = f"""
        block = make(2**26).fill_(1)
        cache._library.tierstore_cache_respect({os.fsencode(group)!r}, 2)
        del block
        cache.make_room(2**26)
        print(mib("returned_bytes") > 0)
    """
    assert forked(program) == "True"


def test_child_of_a_thread_that_was_asking_can_ask(forked: OutputOf) -> None:
    program = """
        import signal
        from tierstore.returning import caching
        inside, is_over = threading.Event(), threading.Event()
        class Slow(dict):
            def values(self):
                inside.set()
                is_over.wait()
                return super().values()
        cache._wishes = Slow()
        asker = threading.Thread(target=cache.ask, args=("one", ("auto", None)))
        asker.start()
        inside.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            is_over._cond = threading.Condition()  # the thread of the parent held its lock
            is_over.set()
            cache.ask("other", ("auto", None))
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        is_over.set()
        asker.join()
    """
    assert forked(program) == "0"


def test_room_that_others_need_is_given_to_them() -> None:
    """Free chunks go to the kernel lazily near a limit, or at once when they are asked for."""
    program = """
        blocks = [make(10 * 2**20).fill_(1) for _ in range(30)]
        del blocks
        others = []
        for _ in range(25):
            others.append(bytearray(10 * 2**20))
            make(2**22).fill_(1)
        print(len(others))
    """
    with made_cgroup("memory", memory__limit_in_bytes=600 * MIB) as cgroup:
        assert output_of(program, *entering(cgroup)) == "25"


def test_what_the_allocator_of_small_blocks_keeps_makes_room_for_large_ones() -> None:
    """Without the cache, glibc makes the large ones of it."""
    program = """
        small, kept = [], []
        for number in range(2400):
            small.append(torch.ones(50 * 2**10))
            if number % 40 == 0:
                kept.append(torch.ones(64))  # so that the heap cannot shrink at its end
        del small
        large = [make(2**22).fill_(1) for _ in range(90)]
        print(len(large))
    """
    with made_cgroup("memory", memory__limit_in_bytes=900 * MIB) as cgroup:
        assert output_of(program, *entering(cgroup)) == "90"


def test_others_get_what_is_idle_without_another_call_of_the_cache() -> None:
    program = """
        large = [make(2**22).fill_(1) for _ in range(80)]
        del large
        small = [torch.ones(50 * 2**10) for _ in range(1600)]  # of the allocator that was there before
        print(len(small), mib("idle_bytes"))
    """
    with made_cgroup("memory", memory__limit_in_bytes=640 * MIB) as cgroup:
        assert output_of(program, *entering(cgroup)) == "1600 320"


def test_another_torch_than_it_was_built_for_is_refused() -> None:
    assert "for another PyTorch than 2.99.0+cpu" in str(caching.library_for("2.99.0+cpu"))
    assert isinstance(caching.library_for(torch.__version__), Path)


def test_switch_turns_it_off_for_stores_that_are_opened_from_then_on(forked: OutputOf) -> None:
    program = """
        import tempfile
        from tierstore import TierStore
        block = make(2**23)
        for setting in ("0", "1"):
            os.environ["TIERSTORE_ALLOCATOR"] = setting
            with tempfile.TemporaryDirectory(dir=".") as drive, TierStore(drive) as store:
                handle = store.put(torch.ones(1))
                other = make(2**23)
                print(store.stats().memory_return, mib("used_bytes"))
                del handle, other
    """
    assert forked(program).splitlines() == ["auto 8", "auto, by the caching allocator of PyTorch's tensors 16"]


STORE = """
import tempfile, torch
from tierstore import TierStore, tiered_offload
with tempfile.TemporaryDirectory(dir=".") as drive, TierStore(drive, host_bytes="4MiB", staging_bytes="8MiB") as store:
    weight = torch.full((2**19,), 0.5, requires_grad=True)
    with tiered_offload(store):
        hidden = weight
        for _ in range(20):
            hidden = hidden.sin()
    hidden.sum().backward()
    print(store.stats().memory_return)
    print(weight.grad.double().sum().item().hex())
"""


def test_store_says_which_allocator_is_at_work_and_bits_are_the_same(tmp_path: Path) -> None:
    def told(*words: str, **changes: str) -> list[str]:
        program = f"import os\nos.chdir({str(tmp_path)!r})\n{STORE}"
        return output_of(program, *words, begin="", **changes).splitlines()

    runner = Path(sys.executable).with_name("tierstore")
    without, of_torch, of_process = told(TIERSTORE_ALLOCATOR="0"), told(), told(str(runner), "run")
    assert without[0] == "auto"
    assert of_torch[0] == "auto, by the caching allocator of PyTorch's tensors"
    assert of_process[0] == "auto, by the caching allocator of the whole process"
    assert without[1] == of_torch[1] == of_process[1]


def test_run_serves_a_process_without_a_store_within_its_cgroup() -> None:
    program = """
        import ctypes, torch
        from tierstore.returning.caching import CacheFigures
        library = ctypes.CDLL(None)
        def figures():
            found = CacheFigures()
            library.tierstore_cache_read(ctypes.byref(found))
            return found
        blocks = [torch.empty(10 * 2**20, dtype=torch.uint8).fill_(1) for _ in range(30)]
        del blocks
        others = [bytearray(10 * 2**20) for _ in range(1)]
        for _ in range(24):
            others.append(bytearray(10 * 2**20))
            torch.empty(2**22, dtype=torch.uint8).fill_(1)
        library.realloc.restype = library.aligned_alloc.restype = ctypes.c_void_p
        library.aligned_alloc.argtypes = library.realloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        library.malloc_usable_size.argtypes = library.free.argtypes = (ctypes.c_void_p,)
        block = library.aligned_alloc(64, 2**20)
        ctypes.memset(block, 5, 2**20)
        assert library.malloc_usable_size(block) == 2**20
        block = library.realloc(block, 2**21)
        assert ctypes.string_at(block, 2**20) == b"\\5" * 2**20
        library.free(block)
        print(len(others), figures().used_bytes, figures().num_looks > 0)
    """
    runner = Path(sys.executable).with_name("tierstore")
    with made_cgroup("memory", memory__limit_in_bytes=600 * MIB) as cgroup:
        assert output_of(program, *entering(cgroup), str(runner), "run", begin="") == "25 0 True"


def test_run_leaves_a_torch_with_an_allocator_of_its_own_to_the_library_for_torch() -> None:
    """As its wheels for aarch64 have. Both libraries have functions of the same names."""
    program = """
        import torch
        from tierstore.returning.caching import CachingAllocator, caching_allocator
        cache = caching_allocator(torch.__version__, lambda nbytes: None)  # nothing of it comes from `posix_memalign`
        assert isinstance(cache, CachingAllocator), cache
        print(cache.scope, cache.serves(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)))
    """
    program = textwrap.dedent(program)
    assert processes.output_of(program, LD_PRELOAD=str(caching.preload_library())).strip() == "PyTorch's tensors True"


def test_run_leaves_a_program_its_signals() -> None:
    """Python ignores SIGPIPE, and programs that it starts would, too: `yes` would end with an error, if ever."""
    done = python("-m", "tierstore", "run", "sh", "-c", "yes | head -n 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "y\n", "")


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_run_refuses_a_library_that_the_loader_cannot_be_told_of(tmp_path: Path, name: str) -> None:
    library = caching.preload_library()
    assert library is not None
    folder = tmp_path / name
    folder.mkdir()
    (folder / library.name).symlink_to(library)
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); from tierstore.cli import main; main()"
    done = python("-c", program, "run", "true")
    assert done.returncode == 2
    assert "the loader ends a path at a space or a colon" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["nonsense"], {}, "COMMAND='nonsense' cannot be used: the system does not start it: No such file"),
        (["true"], {"TIERSTORE_ALLOCATOR": "0"}, "TIERSTORE_ALLOCATOR='0' cannot be used"),
    ],
)
def test_run_refuses_what_cannot_be(words: list[str], environment: dict[str, str], message: str) -> None:
    done = python("-m", "tierstore", "run", *words, **environment)
    assert done.returncode == 2
    assert re.search(message, done.stderr)
