"""Code that rests leaves resident memory, runs again when it is called, and stays where somebody has changed it."""

import sys

import pytest

from tests.processes import python

PROGRAM = """
import ctypes, mmap, re, torch
from pathlib import Path
from tierstore.returning.code_pages import release_code

def of_files():
    return int(re.search(r"RssFile:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

print(torch.eye(3).inverse().sum().item())
before = of_files()
release_code(Path(torch.__file__).resolve().parent)
after = of_files()
print(before - after >= before // 3, torch.eye(3).inverse().sum().item())

library = ctypes.CDLL("libm.so.6")
place = ctypes.cast(library.j0, ctypes.c_void_p).value
page = place // mmap.PAGESIZE * mmap.PAGESIZE
protect = ctypes.CDLL(None).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
assert protect(page, mmap.PAGESIZE, 7) == 0  # as a debugger or a profiler does
ctypes.memset(place, 0xC3, 1)
assert protect(page, mmap.PAGESIZE, 5) == 0
for directory in {Path(path).parent for path in re.findall(r"r-xp .* (/.*libm\\S*)", open("/proc/self/maps").read())}:
    release_code(directory)
print(ctypes.string_at(place, 1).hex())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the pages of a process are looked up in /proc")
def test_code_that_rests_is_let_go_of_and_runs_again_and_what_somebody_has_changed_stays() -> None:
    result = python("-c", PROGRAM)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "3.0\nTrue 3.0\nc3\n"
