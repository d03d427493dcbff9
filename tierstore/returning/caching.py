"""The caching allocator of `native/`: large blocks of freed memory are used again, instead of being returned and taken
anew page by page. It serves PyTorch's CPU tensors from the first store on, or the whole process (`tierstore run`).

It belongs to the process, not to a store. What its stores ask of it is combined: the least limit, and the mode that
returns most. After the last store it goes on as "auto"."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Mapping
from ctypes import CDLL, Structure, c_char_p, c_int, c_uint64
from pathlib import Path

from ..base.config import Mode, memory_cgroups, version_of
from ..base.system_words import words_of
from .allocator import is_counted

SWITCH = "TIERSTORE_ALLOCATOR"
"""The environment variable that turns it off, for stores that are opened from then on: "0"."""
CGROUPS = "TIERSTORE_CGROUPS"
"""The environment variable by which `tierstore run` tells a process that has no store of its memory cgroups."""
_PRELOADED = "tierstore_preload"
_FOR_TORCH = "tierstore_cache_for_torch_"
_TENSORS = "PyTorch's tensors"
_KEEPING: Mapping[Mode, int] = {"never": 0, "auto": 1, "always": 2}  # `Keeping` of native/cache_api.h
_ALWAYS_KEPT_BYTES = 32 * 2**20
_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}


class CacheFigures(Structure):
    """`CacheFigures` of native/cache_api.h."""

    _fields_ = tuple(
        (name, c_uint64)
        for name in (
            "used_bytes", "idle_bytes", "lazy_bytes", "fresh_bytes", "moved_bytes", "returned_bytes", "num_looks",
        )
    )  # fmt: skip


class CachingAllocator:
    """The one of this process. Any thread; no call waits for anything but the kernel."""

    def __init__(self, library: CDLL, scope: str) -> None:
        self.scope = scope
        self._library = library
        library.tierstore_cache_keep.argtypes = (c_int, c_uint64, c_uint64)
        library.tierstore_cache_respect.argtypes = (c_char_p, c_int)
        library.tierstore_cache_make_room.argtypes = (c_uint64,)
        self._wishes: dict[object, tuple[Mode, int | None]] = {}
        self.respect_cgroups()

    def respect_cgroups(self) -> None:
        """Of this process, which may have been moved since."""
        self._library.tierstore_cache_respect(None, 0)
        for folder, version in memory_cgroups():
            if (folder / _LIMIT_FILES[version]).exists():
                self._library.tierstore_cache_respect(os.fsencode(folder), version)

    def ask(self, who: object, wish: tuple[Mode, int | None] | None) -> None:
        """What a store wants: its mode, and a limit on the process's resident memory in bytes. None: nothing more."""
        with _change:
            if wish is None:
                self._wishes.pop(who, None)
            else:
                self._wishes[who] = wish
            modes = [mode for mode, _ in self._wishes.values()] or ["auto"]
            limit = min((limit for _, limit in self._wishes.values() if limit is not None), default=0)
            self._library.tierstore_cache_keep(max(map(_KEEPING.__getitem__, modes)), _ALWAYS_KEPT_BYTES, limit)

    def make_room(self, num_bytes: int) -> None:
        """Others are about to take so many bytes."""
        self._library.tierstore_cache_make_room(num_bytes)

    def serve(self, is_on: bool) -> None:
        """Whether it serves PyTorch's tensors that are made from now on. A whole process it serves to its end."""
        if self.scope == _TENSORS:
            self._library.tierstore_cache_serve(is_on)

    def return_all(self) -> None:
        """Return what no block uses. Blocks allocations meanwhile."""
        self._library.tierstore_cache_return_all()

    def serves(self, make_tensor: MakeTensor) -> bool:
        """Whether a large tensor has its memory from here."""
        return is_counted(lambda: int(self.figures().used_bytes), make_tensor)

    def figures(self) -> CacheFigures:
        found = CacheFigures()
        self._library.tierstore_cache_read(ctypes.byref(found))
        return found


_found: CachingAllocator | str | None = None
_change = threading.RLock()  # a signal handler, or a finalizer, may close a store meanwhile
os.register_at_fork(after_in_child=_change._at_fork_reinit)  # type: ignore[attr-defined]  # by another thread


MakeTensor = Callable[[int], object]
"""Makes a tensor in host memory, of so many bytes."""


def caching_allocator(torch_version: str, make_tensor: MakeTensor) -> CachingAllocator | str:
    """The one of this process, which serves PyTorch's tensors from now on; or why there is none, in words.

    `torch_version`: of the PyTorch that is loaded, `torch.__version__`."""
    global _found
    is_on = os.environ.get(SWITCH) != "0"
    with _change:
        if isinstance(_found, CachingAllocator):
            _found.serve(is_on)
        elif _found is None and is_on:
            _found = _begun(torch_version, make_tensor)
        return _found if is_on and _found is not None else f"{SWITCH}=0"


def at_work() -> CachingAllocator | None:
    """The one that serves this process, if one does."""
    return _found if isinstance(_found, CachingAllocator) else None


def _begun(torch_version: str, make_tensor: MakeTensor) -> CachingAllocator | str:
    process = CDLL(None)
    if hasattr(process, "tierstore_cache_open"):
        preloaded = CachingAllocator(process, "the whole process")
        if preloaded.serves(make_tensor):
            return preloaded  # else torch has an allocator of its own: its wheels for aarch64 have mimalloc inside
    try:
        path = library_for(torch_version)
    except OSError as problem:  # Python's search raises most of those of the folders that it lists
        return f"it cannot be looked for ({words_of(problem)})"
    if isinstance(path, str):
        return path
    try:
        library = CDLL(str(path))
        error: int = library.tierstore_cache_serve(True)
    except (OSError, AttributeError) as problem:
        return f"{path.name} cannot be loaded ({problem})"
    if error:
        return f"it cannot begin: {words_of(OSError(error, os.strerror(error)))}"
    return CachingAllocator(library, _TENSORS)


def why_none() -> str | None:
    """Why a store here would not have it, in words; None: it would, or there is no PyTorch. Nothing is loaded."""
    torch_version = version_of("torch")
    if torch_version is None or hasattr(CDLL(None), "tierstore_cache_open"):
        return None
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    path = library_for(torch_version)
    return path if isinstance(path, str) else None


def library_for(torch_version: str) -> Path | str:
    """The library that was built for that PyTorch; or why there is none."""
    name = _FOR_TORCH + re.sub(r"\W", "_", torch_version)
    found = _path_of(name)
    if found is not None:
        return found
    preload = _path_of(_PRELOADED)
    if preload is None:
        return "tierstore-native is not installed: pip install ./native"
    others = sorted(path.name.partition(".")[0] for path in preload.parent.glob(f"{_FOR_TORCH}*"))
    if others:
        return f"tierstore-native was built for another PyTorch than {torch_version}: pip install ./native"
    return "tierstore-native was built without PyTorch or a C++ compiler: pip install ./native"


def preload_library() -> Path | None:
    """What LD_PRELOAD has to name; None: it was not built."""
    return _path_of(_PRELOADED)


def _path_of(module: str) -> Path | None:
    found = importlib.util.find_spec(module)
    return None if found is None or found.origin is None else Path(found.origin)
