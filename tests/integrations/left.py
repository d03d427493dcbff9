"""Where a training stores, and what it may leave behind."""

import threading
from pathlib import Path

from tierstore.tensors.torch_names import top_hooks


def directory(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir(exist_ok=True)
    return path


def what_is_left(drive: Path) -> list[object]:
    """Threads of stores, files of stores and hooks of this thread. Empty, if all ended with the training."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("tierstore")]
    return [*threads, *drive.iterdir(), *filter(None, [top_hooks(False)])]
