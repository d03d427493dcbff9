"""Real control groups, version 1, below this process's own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["entering", "made_cgroup"]


def entering(group: Path) -> tuple[str, ...]:
    """The words in front of a command that is to run in the group."""
    return ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))


@contextmanager
def made_cgroup(controller: str, **settings: int) -> Iterator[Path]:
    """A group of one controller ("memory", "cpu"), for processes that the test starts; its files are set as given.

    Setting names are those of the controller's files, with "__" for a dot. Skips the test where none can be made.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            folder = Path(f"/sys/fs/cgroup/{controller}{group.rstrip('/')}/tierstore-{os.getpid()}")
            break
    else:
        pytest.skip(f"no {controller} controller of cgroup version 1; version 2 lets no process be below a group's own")
    try:
        folder.mkdir()
        for name, value in settings.items():
            (folder / name.replace("__", ".")).write_text(str(value))
    except OSError as error:
        pytest.skip(f"no {controller} cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()
