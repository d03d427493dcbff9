"""The libraries. The allocator for PyTorch is built if a PyTorch is installed, and a C++ compiler: for that PyTorch."""

import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

TORCH = Path(sysconfig.get_path("platlib"), "torch")  # also where pip builds in isolation, as it runs the same Python
FLAGS = ["-Wall", "-Wextra"]
C_FLAGS = [*FLAGS, "-std=gnu11", "-Werror=implicit-function-declaration"]
CACHE_FLAGS = [*C_FLAGS, "-O2", "-fPIC", "-fvisibility=hidden"]
HEADERS = ["cache_api.h", "cache_blocks.h", "room.h"]


def version_of_torch() -> str | None:
    """As in `torch.__version__`; None: it is not installed."""
    try:
        found = re.search(r"^__version__ = '([^']+)'", (TORCH / "version.py").read_text(), re.MULTILINE)
    except OSError:
        return None
    return found and found[1]


def extensions() -> list[Extension]:
    """All that can be built here."""
    found = [
        Extension(
            "tierstore_native",
            ["tierstore_native.c"],
            depends=["floats.h", "xxh3.h"],
            extra_compile_args=[*C_FLAGS, "-O3"],
            py_limited_api=True,
        ),
        Extension(
            "tierstore_preload",
            ["preload.c", "chunk_cache.c"],
            depends=HEADERS,
            extra_compile_args=CACHE_FLAGS,
            py_limited_api=True,
        ),
    ]
    version = version_of_torch()
    if version is not None:
        cache_for_torch = Extension(
            "tierstore_cache_for_torch_" + re.sub(r"\W", "_", version),  # by its name, none is loaded into another
            ["torch_allocator.cpp"],
            depends=["chunk_cache.c", *HEADERS],
            include_dirs=[str(TORCH / "include")],
            library_dirs=[str(TORCH / "lib")],
            libraries=["c10"],
            language="c++",
            extra_compile_args=[*FLAGS, "-O2", "-std=c++20", "-fvisibility=hidden"],
            extra_link_args=["-Wl,-Bsymbolic-functions"],  # else it would open the cache of a preloaded library
            optional=True,
            py_limited_api=True,
        )
        found.append(cache_for_torch)
    return found


class Build(build_ext):
    """Builds the C part of the allocator for PyTorch, too."""

    def build_extension(self, ext: Extension) -> None:
        if ext.language == "c++":  # C has flags of its own
            ext.extra_objects = self.compiler.compile(
                ["chunk_cache.c"], output_dir=self.build_temp, extra_postargs=CACHE_FLAGS
            )
        super().build_extension(ext)


setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
