"""Which allocator is found, and whether memory really goes back: each in a fresh process with a real environment."""

import ctypes.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "tierstore/returning/allocator.py"
IS_GLIBC = platform.libc_ver()[0] == "glibc"
SYSTEM_PYTHON = "/usr/bin/python3"

# Freed is every second block, so that none of them is at the top of a heap, or the first half (mimalloc returns whole
# segments only). They are returned on a thread of their own, as a store does it.
PROGRAM = """
import ctypes, json, runpy, sys, threading
found = runpy.run_path(sys.argv[1])["allocator_of_process"]()
process = ctypes.CDLL(None)
process.posix_memalign.argtypes = ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t
process.free.argtypes = (ctypes.c_void_p,)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def block():
    place = ctypes.c_void_p()
    assert process.posix_memalign(ctypes.byref(place), 64, 100_000) == 0
    ctypes.memset(place, 1, 100_000)
    return place.value

before_use = found.measure and found.measure()
blocks = [block() for _ in range(2000)]
full, full_use = resident(), found.measure and found.measure()
for place in blocks[:1000] if sys.argv[2] == "mimalloc" else blocks[::2]:
    process.free(place)
freed, freed_use = resident(), found.measure and found.measure()
if found.release is not None:
    thread = threading.Thread(target=found.release)
    thread.start()
    thread.join()
print(json.dumps(dict(
    name=found.name, left_alone=found.left_alone, can_release=found.release is not None,
    full=full, freed=freed, after=resident(), uses=[before_use, full_use, freed_use],
)))
"""


def printed_by(program: str, *arguments: str, python: str = sys.executable, **environment: str) -> str:
    """What it prints in an environment whose only settings of malloc are these."""
    ours = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    line = [python, "-c", program, str(SOURCE), *arguments]
    result = subprocess.run(line, env=clean | environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def examine(python: str = sys.executable, allocator: str = "", **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed_by(PROGRAM, allocator, python=python, **environment))
    return found


glibc = pytest.mark.skipif(not IS_GLIBC, reason="the C library here is not glibc")
HALF = 1000 * 100_000


@glibc
@pytest.mark.parametrize("python", [sys.executable, SYSTEM_PYTHON])  # Debian's is not position-independent
def test_glibc_returns_freed_blocks_and_tells_what_it_holds(python: str) -> None:
    if not os.access(python, os.X_OK):
        pytest.skip(f"there is no {python}")
    found = examine(python)
    assert (found["name"], found["left_alone"], found["can_release"]) == ("glibc", "", True)
    assert found["freed"] > found["full"] - HALF // 4, "glibc returned memory by itself: nothing is tested"
    assert found["after"] < found["full"] - HALF * 0.9
    (used_before, _), (used_full, _), (used_freed, free_freed) = found["uses"]
    assert used_full - used_before >= 2 * HALF
    assert abs(used_full - used_freed - HALF) < HALF // 20
    assert free_freed >= HALF


HEAPS = """
import ctypes, re, runpy, sys
found = runpy.run_path(sys.argv[1])["allocator_of_process"]()
process = ctypes.CDLL(None)
process.malloc.restype = ctypes.c_void_p
process.free.argtypes = (ctypes.c_void_p,)
process.free(process.malloc(32 * 2**20 - 2**16))  # as in a training, glibc takes longer blocks from a heap now

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def is_end_of_heap_kept():
    places = [process.malloc(2**20) for _ in range(100)]
    for place in places:
        ctypes.memset(place, 1, 2**20)
    before = resident()
    for place in reversed(places):
        process.free(place)
    return (before - resident()) // 2**20 < 10

print(is_end_of_heap_kept())
for keeps in (True, False):
    found.keep_freed(keeps)
    print(is_end_of_heap_kept())
    found.release()
blocks = [process.malloc(100_000) for _ in range(200)]  # within the heap that grows by brk(2)
for huge in (True, False, True):
    found.prefer_huge_pages(huge)
    heap = re.search(r"\\[heap\\]\\n(?:[^\\n]*\\n)*?VmFlags:([^\\n]*)", open("/proc/self/smaps").read())
    print(*(flag for flag in heap[1].split() if flag in ("hg", "nh")))
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the kernel has no huge pages")
@glibc
def test_heap_of_glibc_keeps_its_free_end_and_has_the_pages_that_are_preferred_as_it_is_told() -> None:
    assert printed_by(HEAPS) == "False\nTrue\nFalse\nhg\nnh\nhg\n"


DECIDING = [
    ("MALLOC_TRIM_THRESHOLD_", "131072"),
    ("MALLOC_MMAP_THRESHOLD_", "1048576"),
    ("MALLOC_MMAP_MAX_", "0"),
    ("MALLOC_TOP_PAD_", "0"),
    ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.trim_threshold=131072"),
    ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0"),
]
OF_SOMETHING_ELSE = [
    ("MALLOC_ARENA_MAX", "4"),
    ("MALLOC_ARENA_TEST", "2"),
    ("MALLOC_PERTURB_", "0"),
    ("MALLOC_CONF", "dirty_decay_ms:0"),  # of jemalloc, which does not run here
    ("MALLOC_TRIM_THRESHOLD_", ""),
    ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2"),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    ("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=512"),
    ("PYTHONMALLOC", "malloc"),
    ("MIMALLOC_PURGE_DELAY", "0"),
]


@glibc
@pytest.mark.parametrize(("variable", "value"), DECIDING)
def test_setting_that_decides_when_memory_is_returned_is_told(variable: str, value: str) -> None:
    found = examine(**{variable: value})
    assert found["left_alone"] == f"{variable} is set, which decides when glibc returns memory"
    assert found["can_release"], "who asks for it gets it all the same"
    assert found["uses"][0] is not None  # it still tells what it holds


@glibc
@pytest.mark.parametrize(("variable", "value"), OF_SOMETHING_ELSE)
def test_setting_of_something_else_changes_nothing(variable: str, value: str) -> None:
    """Launchers of clusters set the number of arenas, for one."""
    found = examine(**{variable: value})
    assert (found["name"], found["left_alone"], found["can_release"]) == ("glibc", "", True)


OWN_SETTINGS = {
    "jemalloc": {"MALLOC_CONF": "narenas:2,dirty_decay_ms:1000"},
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "5"},
    "mimalloc": {"MIMALLOC_PURGE_DELAY": "10"},
}


@pytest.mark.parametrize(
    ("name", "library"), [("jemalloc", "jemalloc"), ("tcmalloc", "tcmalloc_minimal"), ("mimalloc", "mimalloc")]
)
@pytest.mark.parametrize("python", [sys.executable, SYSTEM_PYTHON])
def test_other_allocators_return_freed_blocks(name: str, library: str, python: str) -> None:
    file = ctypes.util.find_library(library)
    if file is None or not os.access(python, os.X_OK):
        pytest.skip(f"lib{library} or {python} is not installed")
    found = examine(python, name, LD_PRELOAD=file)
    assert (found["name"], found["left_alone"], found["can_release"]) == (name, "", True)
    assert found["after"] < found["full"] - HALF * 0.5
    assert found["uses"] == [None, None, None]
    setting, of_glibc = OWN_SETTINGS[name], {"MALLOC_TRIM_THRESHOLD_": "131072"}
    left_alone = [examine(python, name, LD_PRELOAD=file, **each)["left_alone"] for each in (setting, of_glibc)]
    assert left_alone == [f"{next(iter(setting))} is set, which decides when {name} returns memory", ""]
