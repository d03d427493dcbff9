"""`tierstore run`."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="A program and its arguments.")],
) -> None:
    """Run a program with the caching allocator for its whole process: `tierstore run python train.py`.

    Large blocks of memory are used again instead of being returned to the system: those of PyTorch's CPU tensors, and
    of the libraries that compute with them. The program needs no store. Processes that it starts have the allocator
    too.

    It comes with tierstore-native (`pip install ./native`). TIERSTORE_ALLOCATOR=0 turns it off."""
    from ..base.config import memory_cgroups
    from ..errors import ConfigError
    from ..returning.caching import CGROUPS, SWITCH, preload_library

    library = preload_library()
    if library is None:
        raise ConfigError("COMMAND", command[0], "the caching allocator is not installed: pip install ./native")
    if os.environ.get(SWITCH) == "0":
        raise ConfigError(SWITCH, "0", "it turns off what this command is for; unset it, or run the program itself")
    if {" ", ":"} & set(str(library)):
        raise ConfigError("LD_PRELOAD", str(library), "the loader ends a path at a space or a colon; install elsewhere")
    others = os.environ.get("LD_PRELOAD", "")
    os.environ["LD_PRELOAD"] = f"{library}:{others}" if others else str(library)
    os.environ[CGROUPS] = "\n".join(f"{version} {folder}" for folder, version in memory_cgroups())
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # and by the program then, which may rely on them
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise ConfigError("COMMAND", command[0], f"the system does not start it: {error.strerror}") from error
