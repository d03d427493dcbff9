"""Findings about a machine's memory, cores, limits, accelerators and daemon. Pure."""

from __future__ import annotations

import math

from ..base.config import format_bytes
from .finding import Finding, Found, note, rate, warning
from .measurements import Measurements

__all__ = ["accelerators", "cores", "daemon", "huge_pages", "limits", "memory"]

MIB, GIB = 2**20, 2**30

_USELESS_MEMORY_BYTES, _LITTLE_MEMORY_BYTES = 512 * MIB, 4 * GIB
_SWAPPED_SHARE = 0.05  # of memory
_SLOW_COPY = 2e9
_FEW_HUGE_PAGES = 0.5
_SMALL_SHM_BYTES = GIB
_SEGMENT_BYTES = GIB  # size of an extent file; each takes a descriptor
_OTHER_DESCRIPTORS = 64  # what else a training process has open
_SLOW_LINK = 6e9  # PCIe 3.0 with 8 lanes


def memory(machine: Measurements) -> Found:
    """How much memory there is, and how fast it is."""
    memory = machine.memory
    if memory.available_bytes < _LITTLE_MEMORY_BYTES:
        yield Finding(
            severity="problem" if memory.available_bytes < _USELESS_MEMORY_BYTES else "warning",
            code="little-memory",
            sentence=f"Only {format_bytes(memory.available_bytes)} of memory are available.",
            advice="End other processes, or raise the limit: PyTorch and the model need memory beside the store.",
        )
    if memory.limit_bytes is not None:
        yield note(
            "memory-limit",
            f"A control group limits memory to {format_bytes(memory.limit_bytes)} of the machine's "
            f"{format_bytes(memory.total_bytes)}. The store's default budget respects it.",
        )
    if memory.swap_used_bytes > _SWAPPED_SHARE * memory.total_bytes:
        yield warning(
            "swapping",
            f"{format_bytes(memory.swap_used_bytes)} are swapped out, and training may need some of that memory.",
            "Keep host_bytes below the memory that is really free: the store spills faster than the kernel swaps.",
        )
    if memory.copy_bytes_per_second < _SLOW_COPY:
        yield warning(
            "memory-slow",
            f"One core copies memory at {rate(memory.copy_bytes_per_second)}, which slows down each restore.",
            "Look for other processes that use memory bandwidth, on this machine or beside this virtual machine.",
        )
    if memory.allocator_left_alone is not None:
        yield note(
            "memory-not-returned",
            f"The store does not return freed memory of {memory.allocator} to the system here, because "
            f"{memory.allocator_left_alone}. The process may then not shrink by what the store moves out.",
            "docs/how_to/memory_on_cpu.md lists the settings that matter.",
        )
    if memory.shm_total_bytes is not None and memory.shm_total_bytes < _SMALL_SHM_BYTES:
        yield note(
            "small-shm",
            f"/dev/shm has {format_bytes(memory.shm_total_bytes)}. PyTorch's data loaders need it; the store does not.",
            "In a container, raise it (--shm-size).",
        )


def huge_pages(machine: Measurements) -> Found:
    """Whether memory comes in huge pages."""
    pages = machine.huge_pages
    if pages.enabled in (None, "never"):
        yield warning(
            "no-huge-pages",
            "The kernel gives no huge pages (transparent_hugepage/enabled): transfers are up to a third slower.",
            "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif pages.granted_share is not None and pages.granted_share < _FEW_HUGE_PAGES:
        left = "" if pages.free_bytes is None else f" ({format_bytes(pages.free_bytes)} are free in such pieces)"
        yield warning(
            "memory-fragmented",
            f"Only {pages.granted_share:.0%} of a buffer got the huge pages it asked for: memory is fragmented{left}.",
            "As root: echo 1 > /proc/sys/vm/compact_memory; or raise the limit of the control group, if there is one.",
        )
    if not pages.collapses and pages.shared in (None, "never"):
        yield note(
            "window-in-small-pages",
            "The window that a client shares with a daemon gets no huge pages, neither by itself nor on request "
            "(MADV_COLLAPSE, Linux 6.1): its transfers take up to twice as long.",
            "As root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled; or use an embedded store.",
        )


def cores(machine: Measurements) -> Found:
    """How many cores there are."""
    processor = machine.processor
    if processor.quota_cores is not None and processor.quota_cores < processor.num_allowed:
        yield note(
            "cpu-quota",
            f"A quota leaves {processor.quota_cores:.2g} of {processor.num_allowed} cores.",
            "Limit PyTorch to that many threads (OMP_NUM_THREADS): beyond the quota the kernel stops all of them.",
        )
    if processor.usable_cores < 2:
        yield warning(
            "one-core",
            "This process can use less than two cores, so the store takes its CPU time from training.",
        )


def limits(machine: Measurements) -> Found:
    """The limits of the process."""
    open_files, locked_bytes = machine.limits.open_files, machine.limits.locked_bytes
    wanted = math.ceil(machine.drive.free_bytes / _SEGMENT_BYTES) + _OTHER_DESCRIPTORS
    if open_files is not None and open_files < wanted:
        yield Finding(
            severity="problem" if open_files < _OTHER_DESCRIPTORS else "warning",
            code="few-descriptors",
            sentence=f"A process may open {open_files} files, and a store that fills the drive opens one for each GiB.",
            advice=f"Run ulimit -n {wanted} before you start training, or give a smaller disk_bytes.",
        )
    pageable = any(link.host_memory != "pinned" for link in machine.accelerators.links)
    if locked_bytes is not None and pageable:
        yield note(
            "locked-memory-limit",
            f"A process may lock {format_bytes(locked_bytes)} of memory (ulimit -l); some drivers count pinned memory.",
            "Run ulimit -l unlimited before you start training.",
        )


# --- accelerators and the daemon --------------------------------------------------------------------------------------


def accelerators(machine: Measurements) -> Found:
    """How fast copies to and from accelerators are."""
    state = machine.accelerators
    if state.error is not None:
        yield warning("accelerator-fails", f"An accelerator cannot be used: {state.error}.")
    for number, link in enumerate(state.links):
        slowest = min(link.to_host_bytes_per_second, link.to_device_bytes_per_second)
        if link.host_memory != "pinned":
            yield warning(
                "not-pinned",
                f"Host memory for {link.name} ({number}) is {link.host_memory}: copies do not overlap with compute.",
                "Look at the driver's version, and at the limit of locked memory (ulimit -l).",
            )
        if slowest < _SLOW_LINK:
            yield warning(
                "link-slow",
                f"Copies to and from {link.name} ({number}) reach {rate(slowest)}.",
                "Check how many PCIe lanes the card uses, and of which generation.",
            )


def daemon(machine: Measurements) -> Found:
    """Whether a daemon runs."""
    daemon = machine.daemon
    if daemon.is_answering and daemon.path is not None:
        yield note(
            "daemon-runs",
            f"A daemon answers at {daemon.socket} and uses {daemon.path}.",
            f'Processes that share its drive use TierStore.connect("{daemon.socket}").',
        )
    elif daemon.is_refusing:
        yield warning(
            "daemon-refuses",
            f"A daemon's socket is at {daemon.socket}, but this user may not use it: {daemon.note}.",
            "The user of the daemon can allow this user with --allow-uid, and open the socket with --socket-group.",
        )
    elif daemon.is_present:
        yield warning(
            "daemon-silent",
            f"There is a socket at {daemon.socket}, but no daemon can be used there: {daemon.note}.",
            "Look at the daemon's log. If no daemon runs, remove the socket.",
        )
