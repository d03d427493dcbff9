"""Every rule that keeps gradients right, broken clause by clause: do the tests notice?

    python -m tests.mutations [--jobs N] [R4 ...]

For each mutation a copy of the project is made, one piece of its text replaced, and the tests run that are meant to
notice. Before that they are run once on a copy in which nothing was replaced, where all of them have to pass: what
they notice later is the mutation. A mutation that they do not notice has survived: the table says so, and the command
fails. It also fails where the text to replace is not there once, and where the tests do not come to run.
`test_mutations.py` checks in a second that every piece of text and every test is still there; this takes minutes, and
is run by hand.

What no mutation shows, and why, stands in `UNSHOWN`; it is printed below the table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from rich.table import Table

__all__ = ["MUTATIONS", "ROOT", "RULES", "UNSHOWN", "Mutation", "Unshown"]

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 240
"""For the tests of one mutation; each test has a limit of its own, which pytest enforces."""
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


class Unshown(NamedTuple):
    """A clause of a rule that no mutation shows, and why."""

    rule: str
    clause: str
    reason: str


class Verdict(NamedTuple):
    """What became of a mutation.

    Attributes:
        caught: the tests noticed it.
        told: by which one, or what happened instead.
    """

    caught: bool
    told: str


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
        "R1",
        "a change while somebody waits for the bytes is found",
        _RESIDENCY,
        "        source = self._check_unchanged(record, layout)\n        if record.device is not None:",
        "        source = record.source\n        if record.device is not None:",
        ("store/test_residency_stages.py::test_change_while_a_get_waits_is_found",),
    ),
    Mutation(
        "R1",
        "the version counter is kept when the memory goes",
        _MOVES,
        "            source.data = self._empty if record.device is None else torch.empty(0, device=record.device)",
        "            record.source = torch.empty(0, dtype=source.dtype)",
        ("store/test_store.py::test_get_after_the_tensor_was_changed_raises",),
    ),
    Mutation(
        "R1",
        "a kept tensor's alias shares the version counter",
        "hooks/select.py",
        "tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()",
        "tensor if tensor.is_leaf and tensor.requires_grad else tensor.data",
        (f"{_IN_PLACE}::test_edit_between_forward_and_backward_same_outcome",),
    ),
    Mutation(
        "R1",
        "no false alarm: the version when it was saved counts",
        "tierstore/handle.py",
        "        self.version: int = source._version",
        "        self.version: int = 0",
        (f"{_IN_PLACE}::test_edits_of_tensors_that_are_not_needed_no_false_alarm",),
    ),
    Mutation(
        "R1",
        "no false alarm for what is kept either",
        "hooks/select.py",
        "        self._version: int = tensor._version",
        "        self._version: int = 0",
        (f"{_IN_PLACE}::test_edits_of_tensors_that_are_not_needed_no_false_alarm",),
    ),
    Mutation(
        "R1",
        "the error is the one that plain PyTorch raises",
        "tierstore/errors.py",
        "class ModifiedInPlaceError(TierStoreError, RuntimeError):",
        "class ModifiedInPlaceError(TierStoreError):",
        (f"{_IN_PLACE}::test_edit_between_forward_and_backward_same_outcome",),
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
        ("store/test_lifetime.py::test_exit_leaves_no_thread_of_a_store_running",),
    ),
    Mutation(
        "R2",
        "no table keeps what the graph has dropped",
        "tierstore/store.py",
        "        return Handle(record, self)",
        "        handle = Handle(record, self)\n"
        '        self.__dict__.setdefault("table", {})[record.key] = handle\n'
        "        return handle",
        (f"{_LIFETIME}::test_graph_ends_nothing_is_held",),
    ),
    Mutation(
        "R2",
        "a storage's death takes nothing apart",
        "tierstore/slots.py",
        "        return slot.as_tensor(self._returned.append)",
        "        return slot.as_tensor(lambda slot: (self._returned.append(slot), self.take_back()))",
        (
            "store/test_slots.py",
            "store/test_residency_threads.py",
        ),
    ),
    Mutation(
        "R2",
        "stats() drains first",
        "tierstore/store.py",
        "            self.books.drain()\n            return StoreStats.of(",
        "            return StoreStats.of(",
        (f"{_LIFETIME}::test_memory_handed_out_outlives_graph_and_handle_then_is_returned",),
    ),
    Mutation(
        "R2",
        "at interpreter exit the engine is joined, not only told",
        "tierstore/store.py",
        "            self.engine.stop(deadline_seconds)\n        except",
        "            self.engine.request_stop()\n        except",
        ("store/test_lifetime.py::test_exit_leaves_no_thread_of_a_store_running",),
    ),
    Mutation(
        "R2",
        "at interpreter exit who waits is woken",
        _RESIDENCY,
        "        finally:\n            self._progress.notify_all()",
        "        finally:\n            pass",
        ("store/test_residency_stages.py::test_close_wakes_whoever_waits_before_the_engine_has_ended",),
    ),
    Mutation(
        "R2",
        "the I/O threads work to the end",
        "tierstore/engine.py",
        '        self._io_threads = IoThreads(NUM_SPILLS + NUM_RESTORES, f"{self._name}-io")',
        "        from concurrent.futures import ThreadPoolExecutor\n"
        "        self._io_threads = ThreadPoolExecutor(NUM_SPILLS + NUM_RESTORES)",
        ("store/test_lifetime.py::test_exit_with_a_store_open_is_clean",),
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
        "R3",
        "what was unpacked once can be unpacked again",
        _OFFLOAD,
        "        return self._log.fetch(self._index, self._layout)",
        "        log, self._log = self._log, None\n        return log.fetch(self._index, self._layout)",
        ("hooks/test_repeated_backward.py::test_retain_graph_three_backwards_same_bits",),
    ),
    Mutation(
        "R3",
        "threads that ask for the same bytes share one read",
        _MOVES,
        "        if record.state is not State.READING or record.held is not None:",
        "        if record.state is not State.READING:",
        (
            "store/test_store.py::test_get_of_one_handle_from_many_threads_reads_once",
            "store/test_residency_stages.py",
        ),
    ),
    Mutation(
        "R3",
        "a slot belongs to the storage over it, not to one tensor",
        "tierstore/slab.py",
        "weakref.ref(storage, lambda _: on_return(self))",
        "weakref.ref(tensor, lambda _: on_return(self))",
        (
            "store/test_slab.py",
            "store/test_store.py::test_get_view_of_a_result_alone_keeps_its_memory",
        ),
    ),
    Mutation(
        "R3",
        "a lent slot is free when its storage dies",
        "tierstore/slots.py",
        "                self._books.lent.discharge(slot.nbytes)\n                self.free(slot)",
        "                self._books.lent.discharge(slot.nbytes)",
        ("store/test_slots.py",),
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
        "        tensor = tensor.conj()\n",
        "        pass\n",
        ("hooks/test_layouts.py",),
    ),
    Mutation(
        "R4",
        "lazy negation comes back",
        "tierstore/layout.py",
        "        tensor = torch._neg_view(tensor)\n",
        "        pass\n",
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
        "R4",
        "a saved tensor is held by weak reference",
        _OFFLOAD,
        "            record.root = weakref.ref(root)",
        "            record.root = lambda: root",
        (f"{_LIFETIME}::test_tensors_of_the_user_die_with_their_last_reference",),
    ),
    Mutation(
        "R4",
        "nothing joins once the bytes were read",
        _RESIDENCY,
        "            if record.span is not None or record.source is None or self._closed is not None:",
        "            if record.source is None or self._closed is not None:",
        ("store/test_residency_stages.py::test_join_once_the_bytes_were_read_is_refused",),
    ),
    Mutation(
        "R4",
        "a storage is not known by its address",
        "tierstore/ownership.py",
        "    claims: Claims = storage.__dict__.get(_ATTRIBUTE, [])\n    return claims",
        "    claims: Claims = storage.__dict__.get(_ATTRIBUTE, [])\n"
        '    return globals().setdefault("_by_address", {}).setdefault(_use_count and storage.data_ptr(), claims)',
        ("store/test_ownership.py::test_claims_of_a_new_storage_are_never_those_of_an_old_one",),
    ),
    Mutation(
        "R4",
        "a copy-on-write storage stays shared",
        "tierstore/ownership.py",
        "    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]",
        "    address: int = tensor.untyped_storage().data_ptr()",
        (f"{_ALIASES}::test_copy_on_write_clone_saved_is_not_copied",),
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
        "        torch._C._set_conj(alias, False)",
        "        alias = alias.conj()",
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
        "R5",
        "a view is judged by its base",
        _OFFLOAD,
        "        root = tensor if base is None else base",
        "        root = tensor",
        ("hooks/test_kept.py::test_parameters_and_their_views_kept",),
    ),
    Mutation(
        "R5",
        "aliases that other stores hold are discounted",
        "tierstore/ownership.py",
        "        num_claims = sum(_num_aliases(ref, claims) for ref in claims)",
        "        num_claims = 1",
        ("store/test_ownership.py::test_records_of_two_stores_do_not_count_as_others",),
    ),
    Mutation(
        "R5",
        "ownership is looked at again when a victim is chosen",
        _MOVES,
        "        if not (victim.forced or victim.slot is not None or is_sole_owner(victim)):",
        "        if False:",
        ("store/test_residency_stages.py::test_held_again_while_it_is_kept_in_memory_is_left_alone",),
    ),
    Mutation(
        "R5",
        "ownership is looked at again when room is found",
        _MOVES,
        "                if not (record.forced or is_sole_owner(record)):",
        "                if False:",
        ("store/test_residency_stages.py::test_held_again_while_it_waits_for_room_is_left_alone",),
    ),
    Mutation(
        "R5",
        "what was held is looked at again at each pack",
        _RESIDENCY,
        "            moves.relieve(_NUM_EXAMINED_PER_PACK)",
        "            moves.relieve(0)",
        ("hooks/test_kept.py::test_input_let_go_later_taken_by_later_packs",),
    ),
    Mutation(
        "R5",
        "what was held is looked at again at the end of the scope",
        _RESIDENCY,
        "                    self.moves.relieve(None)\n",
        "                    pass\n",
        ("hooks/test_kept.py::test_let_go_before_the_scope_ends_taken_then",),
    ),
    Mutation(
        "R5",
        "what was held is looked at again at the first unpack",
        "hooks/order.py",
        "            self._start()\n            books.settle()\n",
        "            self._start()\n",
        ("hooks/test_kept.py::test_let_go_after_the_scope_taken_when_backward_begins",),
    ),
    Mutation(
        "R5",
        "what somebody else holds is not charged",
        _MOVES,
        "                self.pending.share(record)\n\n    def admit(",
        "                self.pending.share(record)\n"
        "                self.books.charge(record, self.books.host)\n"
        "\n"
        "    def admit(",
        ("hooks/test_kept.py::test_buffers_and_input_batch_not_taken_and_counted_when_the_graph_ends",),
    ),
    Mutation(
        "R5",
        "what somebody else holds is counted",
        _MOVES,
        '                self.counters.kept_bytes["alive elsewhere"] += record.nbytes',
        "                pass",
        ("hooks/test_kept.py::test_buffers_and_input_batch_not_taken_and_counted_when_the_graph_ends",),
    ),
    Mutation(
        "R5",
        "put() by hand always stores",
        _RESIDENCY,
        "            record.forced = True",
        "            record.forced = False",
        ("store/test_store.py::test_put_of_what_the_caller_keeps_is_written_when_its_turn_comes",),
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
        "R6",
        "nodes come in reverse",
        "tierstore/lookahead.py",
        "key=lambda index: (-nodes[index], index)",
        "key=lambda index: (nodes[index], index)",
        ("store/test_lookahead.py",),
    ),
    Mutation(
        "R6",
        "the number at pack marks the node",
        _OFFLOAD,
        "        node = _sequence_nr()",
        "        node = self._node + 1",
        ("hooks/test_order.py",),
    ),
    Mutation(
        "R6",
        "the order lives in the store, not in the scope",
        _OFFLOAD,
        '        self._orders = store.learned_orders if prefetch == "learned" else None',
        '        self._orders = LearnedOrders() if prefetch == "learned" else None',
        ("hooks/test_order.py::test_odd_order_learned_from_the_first_step",),
    ),
    Mutation(
        "R6",
        "an order is learned for its own sequence of packs",
        "hooks/order.py",
        "        self._signature = hash((self._signature, node - nodes[0] if nodes else 0, record.nbytes))\n",
        "",
        ("hooks/test_scopes.py::test_training_models_one_after_the_other_in_one_store_same_bits",),
    ),
    Mutation(
        "R6",
        "prefetch is a hint: where it fails, the request tries again",
        _MOVES,
        "            record.cause = error if record.demanded else None",
        "            record.cause = error",
        ("store/test_store_errors.py::test_read_ahead_that_has_failed_is_not_told_to_get",),
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
        "R7",
        "the innermost hooks win",
        _OFFLOAD,
        "        scope = _Scope(self._store,",
        "        scope = _enclosing_scope() or _Scope(self._store,",
        ("hooks/test_scopes.py::test_nested_scopes_innermost_store_saves",),
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
        "_Flight(record, None, storage.nbytes(), done)",
        (_DEVICE,),
    ),
    Mutation(
        "R9",
        "a write waits for the copy into its slot",
        "tierstore/engine.py",
        "                if spill.ready is not None:",
        "                if False:",
        ("store/test_engine.py::test_spill_waits_for_the_copy_that_fills_its_slot",),
    ),
    Mutation(
        "R9",
        "a reload waits for the copy that fills its slot",
        "tierstore/device.py",
        "_device_of(record), record.stream, record.ready)",
        "_device_of(record), record.stream, None)",
        (f"{_DEVICE}::test_reload_waits_for_the_copy_out_that_still_runs",),
    ),
    Mutation(
        "R9",
        "the stream at pack is kept with the record; a reload's target is allocated under it",
        "tierstore/device.py",
        "copy_in(slot.as_plain_tensor(), _device_of(record), record.stream, record.ready)",
        "copy_in(\n"
        "            slot.as_plain_tensor(),\n"
        "            _device_of(record),\n"
        "            self._copies.current_stream(_device_of(record)),\n"
        "            record.ready,\n"
        "        )",
        (_DEVICE,),
    ),
    Mutation(
        "R9",
        "a copy out waits for the stream that packed",
        "tierstore/device.py",
        "slot.as_plain_tensor(), record.stream)\n        record.move(State.OFFLOADING)",
        "slot.as_plain_tensor(), self._copies.current_stream(_device_of(record)))\n"
        "        record.move(State.OFFLOADING)",
        (f"{_DEVICE}::test_offload_on_another_stream_than_the_records_follows_the_records",),
    ),
    Mutation(
        "R9",
        "with several streams references are held until the copy is over",
        "tierstore/device.py",
        "        if len(self._streams_seen) > 1:\n            return\n",
        "",
        (f"{_DEVICE}::test_offload_from_two_streams_holds_every_reference",),
    ),
    Mutation(
        "R9",
        "memory in flight is let go of only behind a wait of its stream",
        "tierstore/device.py",
        "            self._copies.wait(stream, flight.done)\n",
        "",
        (f"{_DEVICE}::test_offload_beyond_the_bound_makes_the_stream_wait_not_the_host",),
    ),
    Mutation(
        "R9",
        "a finalizer parks what is being copied",
        "tierstore/device.py",
        "        self.leave(record)\n        self.unload(record)\n",
        "        self.leave(record)\n"
        "        self.unload(record)\n"
        "        self._flights = deque(flight for flight in self._flights if flight.record is not record)\n",
        (f"{_DEVICE}::test_offload_released_meanwhile_holds_the_memory_until_copied",),
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
        "R10",
        "no budget at all is enough",
        "tierstore/host.py",
        "        return self.staging.fits(nbytes) or self.staging.used_bytes == 0",
        "        return self.staging.fits(nbytes)",
        ("store/test_store_budgets.py::test_every_budget_keeps_its_limits_and_the_bytes",),
    ),
    Mutation(
        "R10",
        "a waiting pack holds no room",
        _MOVES,
        "        elif not self._try_admit(record):\n            self.blocked.append(record)",
        "        elif not self._try_admit(record):\n"
        "            self.books.charge(record, self.books.staging)\n"
        "            self.blocked.append(record)",
        ("store/test_store_budgets.py::test_forward_alone_is_held_within_both_budgets_and_one_tensor",),
    ),
    Mutation(
        "R10",
        "a spill takes its staging before it starts",
        _MOVES,
        "        self.books.charge(record, self.books.staging)\n"
        "        self.slots.trim()\n"
        "        record.move(State.QUEUED)",
        "        self.slots.trim()\n        record.move(State.QUEUED)",
        ("store/test_store_budgets.py",),
    ),
    Mutation(
        "R10",
        "what is fetched ahead has its own room",
        "tierstore/host.py",
        "                return window\n        return None",
        "                return window\n        return self.staging",
        ("store/test_host.py::test_prefetch_takes_staging_then_host_and_never_overdraws",),
    ),
    Mutation(
        "R10",
        "a fragmented slab takes a one-off slot",
        "tierstore/slab.py",
        "        if start is None:\n            return Slot(_map(size), None, phase, nbytes, size)",
        "        if start is None:\n            raise MemoryError",
        ("store/test_slab.py::test_allocate_beyond_the_slab_gives_a_mapping_of_its_own",),
    ),
    Mutation(
        "R10",
        "the host budget is never exceeded",
        _MOVES,
        "        if self.books.host.fits(record.nbytes):\n"
        "            self.books.charge(record, self.books.host)\n"
        "        else:",
        "        if True:\n            self.books.charge(record, self.books.host)\n        else:",
        (
            "store/test_store_budgets.py",
            "store/test_residency_threads.py",
        ),
    ),
    Mutation(
        "R10",
        "what finalizers freed lets the others go on",
        _RESIDENCY,
        "        if self.moves.drain():\n            self._advance()",
        "        self.moves.drain()",
        ("store/test_residency_stages.py::test_put_goes_on_when_the_queued_handles_are_dropped",),
    ),
    Mutation(
        "R10",
        "whoever waits is told when a write is passed over",
        _RESIDENCY,
        "                self.moves.withdraw(record)\n                self._advance()\n                return None\n",
        "                return None\n",
        ("store/test_residency_stages.py::test_put_goes_on_when_a_finalizer_has_only_begun",),
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
        (
            "store/test_store_budgets.py::test_disk_full_collects_cycles_before_it_gives_up",
            "hooks/test_failures.py::test_store_full_of_graphs_in_cycles_collected_instead_of_raised",
        ),
    ),
    Mutation(
        "R11",
        "a full file system is told from a broken one",
        "tierstore/disk/boundary.py",
        "    return is_out_of_space(error) or isinstance(error, (lmdb.MapFullError, lmdb.DiskError))",
        "    return False",
        ("store/test_boundary.py",),
    ),
    Mutation(
        "R11",
        "what could not be written stays in memory",
        _MOVES,
        "        elif isinstance(outcome, Stored):\n            record.move(State.CLEAN)",
        "        elif True:\n            record.move(State.CLEAN)",
        ("store/test_store_errors.py::test_write_failed_reaches_flush_and_keeps_the_bytes",),
    ),
    Mutation(
        "R11",
        "a failed write says where the data is",
        "tierstore/disk/shelf.py",
        '_STILL_IN_MEMORY = "the data is still in memory"',
        '_STILL_IN_MEMORY = ""',
        ("store/test_local_disk.py::test_failed_write_takes_nothing_and_the_next_one_works",),
    ),
    Mutation(
        "R11",
        "a record that the index refused is no record",
        "tierstore/disk/shelf.py",
        "            if outcome.error is not None:\n                raise outcome.error\n        if extent is None:",
        "            pass\n        if extent is None:",
        ("store/test_local_disk.py::test_record_that_the_index_refuses_is_no_record",),
    ),
    Mutation(
        "R11",
        "a value in the index is verified too",
        "tierstore/disk/records.py",
        "    _verify(location, _checksum(value, None if location.checksum is None else seed))\n",
        "",
        (
            "store/test_local_disk.py::test_flipped_byte_is_found",
            "store/test_local_disk.py::test_record_of_another_session_is_refused",
        ),
    ),
    Mutation(
        "R11",
        "what could not be read is not handed out",
        _MOVES,
        "        elif isinstance(outcome, Exception):\n"
        "            self._restore_failed(record, outcome)\n"
        "        else:",
        "        elif False:\n            pass\n        else:",
        ("store/test_store_errors.py::test_read_failed_reaches_get_and_may_be_tried_again",),
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
        "R12",
        "files have no name where O_TMPFILE is unknown",
        "tierstore/disk/linux.py",
        "    os.unlink(name)\n",
        "",
        ("store/test_extents.py::test_segment_without_o_tmpfile_has_no_name_either",),
    ),
    Mutation(
        "R12",
        "the last reference ends the store",
        "tierstore/store.py",
        "        self._finalizer = weakref.finalize(self, self._core.engine.request_stop)",
        "        self._finalizer = weakref.finalize(self, bool)",
        ("store/test_store.py::test_store_unreferenced_without_close_ends_by_itself",),
    ),
    Mutation(
        "R12",
        "an engine that ends frees what is on disk",
        "tierstore/engine.py",
        "            await disk.close()",
        "            pass",
        ("store/test_store.py::test_stores_opened_and_closed_often_leave_nothing",),
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
        "R13",
        "forked children are told",
        "tierstore/lifetime.py",
        "os.register_at_fork(after_in_child=_in_child)",
        "",
        ("store/test_lifetime.py::test_fork_child_has_no_file_and_cannot_use_what_it_inherited",),
    ),
    Mutation(
        "R13",
        "a child has no descriptor of an extent",
        "tierstore/disk/local.py",
        "        let_go_of({self._index.inode, *self._space.inodes})",
        "        let_go_of({self._index.inode})",
        ("store/test_lifetime.py::test_fork_child_that_outlives_a_killed_parent_keeps_no_disk_space",),
    ),
    Mutation(
        "R13",
        "a child has no descriptor of the index",
        "tierstore/disk/local.py",
        "        let_go_of({self._index.inode, *self._space.inodes})",
        "        let_go_of(self._space.inodes)",
        ("store/test_lifetime.py::test_fork_child_that_outlives_a_killed_parent_keeps_no_disk_space",),
    ),
    Mutation(
        "R13",
        "a child has no mapping of the index",
        "tierstore/disk/index.py",
        "        dont_fork(*found)\n",
        "",
        ("store/test_lifetime.py::test_fork_child_that_outlives_a_killed_parent_keeps_no_disk_space",),
    ),
    Mutation(
        "R13",
        "no file is opened while a fork goes on",
        "tierstore/disk/segments.py",
        "    with not_while_forking:",
        "    if True:",
        ("store/test_extents.py::test_segment_is_opened_and_noted_in_one_with_regard_to_forks",),
    ),
    Mutation(
        "R13",
        "a lock that a thread of the parent held is no child's",
        _RESIDENCY,
        "        self.lock = threading.Lock()\n"
        "        self._progress = threading.Condition(self.lock)\n"
        "        self._closed = StoreClosedError(self._name, reason)",
        "        self._closed = StoreClosedError(self._name, reason)",
        ("store/test_lifetime.py::test_fork_while_others_put_harms_neither_side",),
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
        "R14",
        "nested tensors stay",
        "tierstore/layout.py",
        "        and not tensor.is_nested\n",
        "",
        ("hooks/test_unsupported.py::test_nested_tensors_same_bits",),
    ),
    Mutation(
        "R14",
        "tensors without memory stay",
        "tierstore/layout.py",
        "        and (tensor.is_cpu or tensor.device.type in _ACCELERATORS)\n",
        "",
        ("hooks/test_unsupported.py::test_meta_tensors_pass_and_nothing_is_stored",),
    ),
    Mutation(
        "R14",
        "inference tensors are copied when put",
        "tierstore/store.py",
        "                tensor = tensor.clone()",
        "                pass",
        ("hooks/test_layouts.py::test_put_of_an_inference_tensor_as_it_was_then",),
    ),
    Mutation(
        "R14",
        "what stays is counted by reason",
        _OFFLOAD,
        "        self._books.count_kept(reason, bytes_of(tensor))\n",
        "",
        ("hooks/test_unsupported.py::test_unsupported_kind_saved_right_value_and_counted",),
    ),
    Mutation(
        "R14",
        "keep_resident(hooks=False) lets torch.func run",
        _OFFLOAD,
        "            while (hooks := _top_hooks(False)) is not None:",
        "            while False and (hooks := _top_hooks(False)) is not None:",
        ("hooks/test_functional.py::test_transform_inside_keep_resident_without_hooks_gives_the_same",),
    ),
    Mutation(
        "R14",
        "afterwards the hooks are back",
        _OFFLOAD,
        "            _push_hooks(*removed.pop())",
        "            removed.pop()",
        ("hooks/test_functional.py::test_all_hooks_are_back_where_they_were",),
    ),
    Mutation(
        "R15",
        "the newest node's tensors are not read yet",
        _OFFLOAD,
        "            self._books.track(record, settled)\n            self._fresh.append(record)",
        "            self._books.track(record, [*settled, record])",
        ("hooks/test_order.py", "hooks/test_simulated_accelerator.py"),
    ),
    Mutation(
        "R15",
        "not before the last tensor of the node either",
        _OFFLOAD,
        "        if node != self._node:",
        "        if True:",
        ("hooks/test_order.py::test_what_the_newest_node_saved_is_not_read_when_it_saves_more",),
    ),
    Mutation(
        "R15",
        "a pack of a later node settles what was saved before",
        _OFFLOAD,
        "            if settled:\n                self._books.settle(settled, examine=False)\n",
        "",
        (f"{_LIFETIME}::test_memory_of_stored_tensors_is_freed_while_the_graph_lives",),
    ),
    Mutation(
        "R15",
        "the end of the scope settles what is left",
        _OFFLOAD,
        "        self._books.settle(self._fresh)\n",
        "        self._books.settle()\n",
        ("hooks/test_kept.py::test_input_let_go_later_taken_by_flush",),
    ),
]


_NO_DEVICE = "needs an accelerator; tests/hooks/test_gpu.py runs there"
_NO_DAEMON = "there is no daemon yet"

UNSHOWN = [
    Unshown(
        "R1", "allow_mutation_on_saved_tensors is not supported", "a limit, told in the README; no code is about it"
    ),
    Unshown(
        "R7", "only a checkpoint's inputs reach the hooks", "PyTorch's doing; hooks/test_scopes.py checks that it is so"
    ),
    Unshown("R8", "what is saved during a CUDA-graph capture stays", _NO_DEVICE),
    Unshown("R9", "copy streams wait for what packed, and for an event after the allocation", _NO_DEVICE),
    Unshown("R12", "a client's session is a lease", _NO_DAEMON),
    Unshown(
        "R14",
        "wrappers of functional transforms stay",
        "PyTorch hands hooks what is inside; the check is a second line",
    ),
    Unshown("R13", "a child has no copy of the daemon's socket and slab", _NO_DAEMON),
]


def _copy(destination: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, destination / name)


def _run(copy: Path, tests: list[str], *options: str) -> subprocess.CompletedProcess[str] | None:
    """Run tests of a copy; None: they did not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "60", "-p", "no:cacheprovider", *options]
    process = subprocess.Popen(
        command + [f"tests/{test}" for test in tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it has started too
        process.communicate()
        return None
    return subprocess.CompletedProcess(command, process.returncode, output)


def _judge(mutation: Mutation) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy = Path(scratch)
        _copy(copy)
        path = copy / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.before) != 1:
            return Verdict(False, "DOES NOT APPLY: its text is not there once")
        path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
        done = _run(copy, list(mutation.tests), "-x")
    if done is None:
        return Verdict(True, "the tests do not end")
    if done.returncode == pytest.ExitCode.OK:
        return Verdict(False, "SURVIVED")
    if done.returncode < 0:
        return Verdict(True, f"the process is ended by signal {-done.returncode}")
    if done.returncode != pytest.ExitCode.TESTS_FAILED:
        return Verdict(False, f"DOES NOT RUN: {done.stdout.strip().splitlines()[-1]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Verdict(True, failed[0].split(" ")[1].removeprefix("tests/") if failed else "a test does not end")


def _pass_unbroken(mutations: list[Mutation]) -> bool:
    """Whether all tests of the mutations pass where nothing was replaced; says which do not."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    passed = True
    for test in sorted({test.split("::")[0] for test in tests}):
        with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
            _copy(Path(scratch))
            of_file = [other for other in tests if other.split("::")[0] == test]
            done = _run(Path(scratch), [test] if test in of_file else of_file)
        if done is None or done.returncode != pytest.ExitCode.OK:
            passed = False
            print(f"fails already where nothing was replaced: {test}\n{done.stdout if done else 'it does not end'}")
    return passed


def main() -> int:
    """Run the mutations of the rules that are named (default: all); 1 if one of them is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", metavar="RULE", choices=[[], *RULES], help="such as R4")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not given.rules or mutation.rule in given.rules]
    table = Table()
    for column in ("rule", "clause that was broken", "caught by"):
        table.add_column(column, overflow="fold")
    num_caught = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        unbroken = pool.submit(_pass_unbroken, chosen)
        for mutation, verdict in zip(chosen, pool.map(_judge, chosen), strict=True):
            num_caught += verdict.caught
            print(f"{mutation.rule}: {mutation.clause}: {verdict.told}", file=sys.stderr, flush=True)
            table.add_row(mutation.rule, mutation.clause, verdict.told)
    console = Console()
    console.print(table)
    for unshown in UNSHOWN:
        if not given.rules or unshown.rule in given.rules:
            console.print(f"not shown: {unshown.rule}, {unshown.clause}: {unshown.reason}")
    console.print(f"{len(chosen)} mutations, {num_caught} caught, {len(chosen) - num_caught} not")
    return 0 if unbroken.result() and num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
