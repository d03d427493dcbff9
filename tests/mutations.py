"""Every rule that keeps gradients right, broken once: do the tests notice?

    python -m tests.mutations [--jobs N] [R4 ...]

For each mutation a copy of the project is made, one piece of its text replaced, and the tests run that are meant to
notice. A mutation that they do not notice has survived: the table says so, and the command fails. `test_mutations.py`
checks that every piece of text is still there; this takes minutes, and is run by hand.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

__all__ = ["MUTATIONS", "ROOT", "RULES", "Mutation"]

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 240
_COPIED = ("tierstore", "hooks", "tests", "examples", "pyproject.toml")

RULES = {
    "R1": "changes in place are found as PyTorch finds them",
    "R2": "state lives in the packed object, finalizers only append",
    "R3": "unpacked any number of times; memory handed out belongs to its storage",
    "R4": "views of one storage are one record, where that is safe",
    "R5": "what stays alive anyway is left alone",
    "R6": "the order of backward is known, then learned",
    "R7": "checkpointing works in both forms",
    "R8": "beside a compiler",
    "R9": "every stream waits for what it needs",
    "R10": "no deadlock at any budget",
    "R11": "whole or not at all",
    "R12": "nothing outlives its owner",
    "R13": "forked children are inert",
    "R14": "what is unsupported is kept",
    "R15": "nothing is read before the kernel has run",
}


class Mutation(NamedTuple):
    """One clause of a rule, and how to break it.

    Attributes:
        rule: a key of `RULES`.
        clause: in words.
        file: below the project's root.
        before, after: the text, found there exactly once, and what replaces it.
        tests: files or node ids, below `tests/`.
    """

    rule: str
    clause: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


_RESIDENCY, _MOVES, _OFFLOAD = "tierstore/residency.py", "tierstore/moves.py", "hooks/offload.py"
_IN_PLACE, _ALIASES, _LIFETIME = "hooks/test_in_place.py", "hooks/test_aliases.py", "hooks/test_lifetime.py"
_DEVICE = "store/test_device.py"

MUTATIONS = [
    Mutation(
        "R1",
        "a stored tensor that was changed is refused",
        _RESIDENCY,
        "if source._version != record.version:",
        "if False:",
        (_IN_PLACE,),
    ),
    Mutation(
        "R1",
        "a kept tensor that was changed is refused",
        "hooks/traced.py",
        "if tensor._version != version:",
        "if False:",
        (_IN_PLACE,),
    ),
    Mutation(
        "R1",
        "the alias shares the version counter",
        "tierstore/layout.py",
        "    alias = tensor.detach()\n",
        "    alias = tensor.data\n",
        (_IN_PLACE, "store/test_layout.py"),
    ),
    Mutation(
        "R1",
        "restored views share the version counter",
        "tierstore/layout.py",
        "    tensor = tensor.as_strided(layout.size, layout.stride, layout.offset - first_byte // itemsize)",
        "    tensor = tensor.data.as_strided(layout.size, layout.stride, layout.offset - first_byte // itemsize)",
        ("hooks/test_custom_functions.py", "store/test_layout.py"),
    ),
    Mutation(
        "R2",
        "a saved output is not held itself",
        "tierstore/layout.py",
        "    alias = tensor.detach()\n",
        "    alias = tensor\n",
        (_LIFETIME, "store/test_layout.py"),
    ),
    Mutation(
        "R2",
        "a kept output is not held itself",
        "hooks/select.py",
        "tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()",
        "tensor",
        (_LIFETIME, "hooks/test_kept.py"),
    ),
    Mutation(
        "R2",
        "a kept parameter is handed back itself",
        "hooks/select.py",
        "tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()",
        "tensor.detach()",
        (_IN_PLACE,),
    ),
    Mutation(
        "R2",
        "a dropped handle frees its record",
        "tierstore/handle.py",
        "        self.owner.released.append(record)",
        "        pass",
        (_LIFETIME,),
    ),
    Mutation(
        "R2",
        "a finalizer takes no lock",
        "tierstore/handle.py",
        "        self.owner.released.append(record)",
        "        with self.owner.books.lock:\n            self.owner.released.append(record)",
        ("store/test_residency_threads.py",),
    ),
    Mutation(
        "R2",
        "a finalizer drops the memory at once",
        "tierstore/handle.py",
        "        record.source = None\n        record.views = {}",
        "        pass",
        (_LIFETIME, "store/test_store.py"),
    ),
    Mutation(
        "R2",
        "the engine is ended at interpreter exit",
        "tierstore/lifetime.py",
        "atexit.register(_at_exit)",
        "",
        ("store/test_lifetime.py",),
    ),
    Mutation(
        "R3",
        "a slot that is handed out is not used again",
        "tierstore/slots.py",
        "        if slot.watch is None or slot.returned:",
        "        if True:",
        (_LIFETIME, "store/test_store_budgets.py", "store/test_store.py"),
    ),
    Mutation(
        "R3",
        "lent memory is accounted for",
        "tierstore/slots.py",
        "            self._books.lent.charge(slot.nbytes)\n",
        "",
        ("store/test_store_budgets.py",),
    ),
    Mutation(
        "R3",
        "the record keeps what it hands out, so that autograd does not take it for its own",
        _RESIDENCY,
        "            view = record.views[layout] = rebuild(",
        "            view = rebuild(",
        ("hooks/test_custom_functions.py",),
    ),
    Mutation(
        "R4",
        "views of one storage are stored once",
        "hooks/aliases.py",
        "            return handle, layout\n",
        "            pass\n",
        (_ALIASES,),
    ),
    Mutation(
        "R4",
        "they join only as views of the same living tensor",
        "hooks/aliases.py",
        "            and record.root() is root\n",
        "",
        (_ALIASES, _IN_PLACE),
    ),
    Mutation(
        "R4",
        "they join only at the same version",
        "hooks/aliases.py",
        " or record.version != tensor._version",
        "",
        (_ALIASES, _IN_PLACE),
    ),
    Mutation(
        "R4",
        "restored bytes join only if they are confirmed",
        _RESIDENCY,
        "        if not self.moves.engine.disk.confirms(record.key, memory):",
        "        if False:",
        ("hooks/test_repeated_backward.py",),
    ),
    Mutation(
        "R4",
        "restored bytes that are saved again join",
        "hooks/aliases.py",
        "            if restored is not None:",
        "            if False:",
        ("hooks/test_repeated_backward.py",),
    ),
    Mutation(
        "R4",
        "a view of a restored part lies where it lay",
        _RESIDENCY,
        "layout._replace(offset=layout.offset + record.first_byte // layout.dtype.itemsize)",
        "layout",
        (_ALIASES,),
    ),
    Mutation(
        "R4",
        "all views' bytes are stored",
        _RESIDENCY,
        "            record.layouts.append(layout)\n",
        "",
        (_ALIASES,),
    ),
    Mutation(
        "R4",
        "lazy conjugation comes back",
        "tierstore/layout.py",
        "        _set_lazy_bits(tensor, layout.conj, layout.neg)\n",
        "        _set_lazy_bits(tensor, False, layout.neg)\n",
        ("hooks/test_layouts.py",),
    ),
    Mutation(
        "R4",
        "lazy negation comes back",
        "tierstore/layout.py",
        "        _set_lazy_bits(tensor, layout.conj, layout.neg)\n",
        "        _set_lazy_bits(tensor, layout.conj, False)\n",
        ("hooks/test_layouts.py",),
    ),
    Mutation(
        "R4",
        "a tensor is measured by its storage",
        _OFFLOAD,
        "        if storage.nbytes() < self._min_bytes or not tensor.numel():",
        "        if tensor.numel() * tensor.itemsize < self._min_bytes or not tensor.numel():",
        ("hooks/test_kept.py",),
    ),
    Mutation(
        "R5",
        "leaves that require gradients stay",
        "hooks/select.py",
        "    if root.requires_grad and root.is_leaf:",
        "    if False:",
        ("hooks/test_kept.py",),
    ),
    Mutation(
        "R5",
        "frozen parameters stay",
        "hooks/select.py",
        "    return type(root) is not torch.Tensor and isinstance(root, Parameter)",
        "    return False and isinstance(root, Parameter)",
        ("hooks/test_kept.py",),
    ),
    Mutation(
        "R5",
        "only what nobody else holds is taken",
        "tierstore/ownership.py",
        "        num_owners == num_claims\n",
        "        True\n",
        ("hooks/test_kept.py", "store/test_ownership.py"),
    ),
    Mutation(
        "R5",
        "a storage that moved is managed elsewhere",
        "tierstore/ownership.py",
        "        and storage_address(source) == record.address\n",
        "",
        ("store/test_ownership.py", _IN_PLACE),
    ),
    Mutation(
        "R5",
        "the storage's Python object may not be held either",
        "tierstore/ownership.py",
        "        and getrefcount(source.untyped_storage()) == _NUM_REFERENCES_UNSHARED\n",
        "",
        ("store/test_ownership.py", _IN_PLACE),
    ),
    Mutation(
        "R5",
        "memory with owners outside of torch stays",
        "tierstore/ownership.py",
        "    return (not storage.resizable() or storage.is_shared()) and _OURS not in storage.__dict__",
        "    return False",
        (_ALIASES,),
    ),
    Mutation(
        "R5",
        "an alias without lazy bits is one owner",
        "tierstore/layout.py",
        "        _set_lazy_bits(alias, False, False)\n",
        "        alias = alias.conj() if layout.conj else torch._neg_view(alias)\n",
        ("hooks/test_layouts.py",),
    ),
    Mutation(
        "R5",
        "what was held is looked at again by flush",
        _RESIDENCY,
        "            self.moves.examine()\n            self._make_room()",
        "            self._make_room()",
        ("hooks/test_kept.py", "hooks/test_gradients.py"),
    ),
    Mutation(
        "R6",
        "a node's tensors come in the order of packing",
        "tierstore/lookahead.py",
        "    return sorted(range(len(nodes)), key=lambda index: (-nodes[index], index))",
        "    return list(reversed(range(len(nodes))))",
        ("store/test_lookahead.py",),
    ),
    Mutation(
        "R6",
        "the observed order is learned",
        "hooks/order.py",
        "            self._orders.learn(self._signature, self._observed)",
        "            pass",
        ("hooks/test_order.py",),
    ),
    Mutation(
        "R6",
        "what lies ahead is fetched",
        _MOVES,
        "        while (record := ahead.peek()) is not None:\n            fetched_bytes = record.nbytes",
        "        while (record := ahead.peek()) is not None and False:\n            fetched_bytes = record.nbytes",
        ("hooks/test_order.py",),
    ),
    Mutation(
        "R7",
        "what is packed during backward starts a log of its own",
        _OFFLOAD,
        "        if self._log.started:",
        "        if False:",
        ("hooks/test_scopes.py", "hooks/test_architectures.py", "hooks/test_repeated_backward.py"),
    ),
    Mutation(
        "R8",
        "a compiled region that asks for too much is warned of",
        "hooks/compiled.py",
        "    if nbytes is not None and node is not None and node.name() == _COMPILED_NODE:",
        "    if False:",
        ("hooks/test_compile.py",),
    ),
    Mutation(
        "R8",
        "nothing else is warned of",
        "hooks/compiled.py",
        "    if nbytes is not None and node is not None and node.name() == _COMPILED_NODE:",
        "    if nbytes is not None:",
        ("hooks/test_compile.py",),
    ),
    Mutation(
        "R8",
        "a scope inside of what is compiled is warned of",
        _OFFLOAD,
        '            warn_of_compiled_caller("tiered_offload")',
        "            pass",
        ("hooks/test_compile.py",),
    ),
    Mutation(
        "R8",
        "Dynamo never looks into the store",
        "tierstore/uncompiled.py",
        "    _mark(function, _SKIP, _SKIP)\n    return _refuse_traces(function)",
        "    return function",
        ("hooks/test_compile.py",),
    ),
    Mutation(
        "R8",
        "compiled autograd keeps its graph whole",
        _OFFLOAD,
        "@traceable\n",
        "@uncompiled\n",
        ("hooks/test_compile.py",),
    ),
    Mutation(
        "R8",
        "a compiled graph is given copies",
        "hooks/traced.py",
        "    return memory.clone().as_strided(size, stride)",
        "    return memory.as_strided(size, stride)",
        ("hooks/test_compile.py",),
    ),
    Mutation(
        "R9",
        "the stream that asks waits for the reload",
        "tierstore/device.py",
        "            self._copies.wait(current, copied)\n",
        "            pass\n",
        (_DEVICE,),
    ),
    Mutation(
        "R9",
        "the record's stream waits for the reload",
        "tierstore/device.py",
        "        self._copies.wait(record.stream, copied)\n        current",
        "        current",
        (_DEVICE,),
    ),
    Mutation(
        "R9",
        "a slot is not used again before the copy from it is over",
        "tierstore/device.py",
        "        if ready.query():\n            then()",
        "        if True:\n            then()",
        (_DEVICE,),
    ),
    Mutation(
        "R9",
        "device memory is held until it is copied",
        "tierstore/device.py",
        "_Flight(record, storage, storage.nbytes(), done)",
        "_Flight(record, storage._new_shared(0) if False else None, storage.nbytes(), done)  # type: ignore",
        (_DEVICE,),
    ),
    Mutation(
        "R10",
        "who waits for bytes may overdraw staging",
        _MOVES,
        "            window = window or self.books.staging  # overdrawn, by one tensor for each thread that waits",
        "            if window is None:\n                return False",
        ("store/test_store_budgets.py",),
    ),
    Mutation(
        "R10",
        "prefetch does not overdraw",
        _MOVES,
        "            if not demanded:\n                return False\n            while",
        "            while",
        ("store/test_store.py", "store/test_store_budgets.py", "store/test_lookahead.py"),
    ),
    Mutation(
        "R10",
        "what was fetched ahead is dropped before a pack waits",
        _MOVES,
        "            if not (self._spill_next() or self._drop_next()):",
        "            if not self._spill_next():",
        ("store/test_store_budgets.py", "store/test_residency_stages.py"),
    ),
    Mutation(
        "R10",
        "whoever waits is woken by what is freed",
        _RESIDENCY,
        "            self.moves.prefetch(self._ahead)\n        self._progress.notify_all()",
        "            self.moves.prefetch(self._ahead)",
        ("store/test_residency_stages.py",),
    ),
    Mutation(
        "R11",
        "short writes and reads are carried on",
        "tierstore/disk/transfer.py",
        "        _advance(pending, moved)\n",
        "        pending.clear()\n",
        ("store/test_local_disk.py", "store/test_extents.py"),
    ),
    Mutation(
        "R11",
        "a file that ends too early is an error",
        "tierstore/disk/transfer.py",
        "        if moved == 0:\n",
        "        if moved == 0:\n            return\n        if moved < 0:\n",
        ("store/test_local_disk.py",),
    ),
    Mutation(
        "R11",
        "checksums are verified",
        "tierstore/disk/records.py",
        "    if found != location.checksum:",
        "    if False:",
        ("store/test_local_disk.py",),
    ),
    Mutation(
        "R11",
        "the key is part of the checksum",
        "tierstore/disk/location.py",
        'struct.pack("<QQ", session, key)',
        'struct.pack("<QQ", session, 0)',
        ("store/test_local_disk.py",),
    ),
    Mutation(
        "R11",
        "the session is part of the checksum",
        "tierstore/disk/location.py",
        'struct.pack("<QQ", session, key)',
        'struct.pack("<QQ", 0, key)',
        ("store/test_local_disk.py",),
    ),
    Mutation(
        "R11",
        "a failed write is told",
        _MOVES,
        "            self.spill_error = error\n",
        "            pass\n",
        ("store/test_store_errors.py",),
    ),
    Mutation(
        "R11",
        "garbage is collected before the store says that it is full",
        _RESIDENCY,
        "            gc.collect()\n",
        "            pass\n",
        ("store/test_store_budgets.py", "hooks/test_failures.py"),
    ),
    Mutation(
        "R12",
        "files have no name",
        "tierstore/disk/linux.py",
        "        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)",
        "        return tempfile.mkstemp(dir=directory)[0]",
        ("store/test_store.py", "store/test_local_disk.py"),
    ),
    Mutation(
        "R13",
        "a forked child lets go of the files",
        "tierstore/disk/forking.py",
        "        os.dup2(null, descriptor, inheritable=False)",
        "        pass",
        ("store/test_lifetime.py",),
    ),
    Mutation(
        "R13",
        "a forked child cannot use what it inherited",
        _RESIDENCY,
        "        self._closed = StoreClosedError(self._name, reason)\n        self.moves.abandon()",
        "        self.moves.abandon()",
        ("store/test_lifetime.py",),
    ),
    Mutation(
        "R14",
        "subclasses stay",
        "tierstore/layout.py",
        "        (kind is torch.Tensor or kind is torch.nn.Parameter)\n",
        "        True\n",
        ("hooks/test_unsupported.py",),
    ),
    Mutation(
        "R14",
        "sparse tensors stay",
        "tierstore/layout.py",
        "        and tensor.layout is torch.strided\n"
        "        and not tensor.is_nested\n"
        "        and not tensor.is_quantized\n"
        "        and not tensor._is_zerotensor()\n"
        "        and not tensor.is_inference()\n"
        "        and _has_storage(tensor)\n",
        "        and not tensor.is_nested\n"
        "        and not tensor.is_quantized\n"
        "        and not tensor._is_zerotensor()\n"
        "        and not tensor.is_inference()\n",
        ("hooks/test_unsupported.py",),
    ),
    Mutation(
        "R14",
        "zeros without memory stay",
        "tierstore/layout.py",
        "        and not tensor._is_zerotensor()\n",
        "",
        ("hooks/test_unsupported.py", "hooks/test_layouts.py"),
    ),
    Mutation(
        "R14",
        "quantized tensors stay",
        "tierstore/layout.py",
        "        and not tensor.is_quantized\n",
        "",
        ("hooks/test_unsupported.py",),
    ),
    Mutation(
        "R14",
        "the refusal of torch.func says what to do",
        _OFFLOAD,
        "        error.add_note(_ADVICE)",
        "        pass",
        ("hooks/test_functional.py",),
    ),
    Mutation(
        "R15",
        "the newest node's tensors are not read yet",
        _OFFLOAD,
        "            self._books.track(record, settled)\n            self._fresh.append(record)",
        "            self._books.track(record, [*settled, record])",
        ("hooks/test_order.py", "hooks/test_simulated_accelerator.py"),
    ),
]


def _copy(destination: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, destination / name)


def _notice(mutation: Mutation) -> str:
    """The first test that fails, or "" if none does."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy = Path(scratch)
        _copy(copy)
        path = copy / mutation.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutation.before, mutation.after), encoding="utf-8")
        options = ["-q", "-x", "--timeout", "60", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in mutation.tests)]
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env={"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "does not end"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 0:
        return ""
    return failed[0].split(" ")[1].removeprefix("tests/") if failed else "the run was ended"


def main() -> int:
    """Run the mutations of the rules that are named (default: all); 1 if one of them survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", metavar="RULE", choices=[[], *RULES], help="such as R4")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not given.rules or mutation.rule in given.rules]
    table = Table()
    for column in ("rule", "clause that was broken", "noticed by"):
        table.add_column(column, overflow="fold")
    survived = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for mutation, noticed in zip(chosen, pool.map(_notice, chosen), strict=True):
            survived += not noticed
            table.add_row(mutation.rule, mutation.clause, noticed or "NOTHING: it survived")
    console = Console()
    console.print(table)
    console.print(f"{len(chosen)} mutations, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
