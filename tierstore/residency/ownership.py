"""Whether anybody besides the stores holds a storage, so that its bytes may be taken away.

Moving a storage's bytes to disk frees memory only if nobody but the stores of this process holds it. Only then it is
certain, too, that the bytes do not change. So the count of a storage's owners is compared with the number of aliases
that the stores hold, its *claims*.

Claims are listed on the storage's own Python object: PyTorch keeps that object, and its attributes, as long as the
storage lives. So claims cannot be mistaken for those of another storage at the same address, and no table of them has
to be cleaned up."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from sys import getrefcount

import torch

from ..tensors.torch_names import storage_address, storage_use_count
from .handle import Handle, Record

_LEAST_CLEANED = 8


class Claims(list["weakref.ref[Record]"]):
    """The records, of any store, that hold or held an alias of one storage.

    `clean_at`: with so many, those that hold none any more are taken out. Nested graphs save a storage once more in
    each, so all may hold one: the limit doubles, or each new claim would look at all others."""

    clean_at = _LEAST_CLEANED

    def clean(self) -> None:
        self[:] = [ref for ref in self if (record := ref()) is not None and record.claims is self and record()]
        self.clean_at = max(_LEAST_CLEANED, 2 * len(self))


CLAIMS_ATTRIBUTE = "_tierstore_claims"
"""Of the Python object of a storage that a record, dead or alive, was made of."""
_unshared = torch.empty(0)
_NUM_REFERENCES_UNSHARED = getrefcount(_unshared.untyped_storage())
"""References to a living storage's Python object, as `is_sole_owner` counts them, when nobody else refers to it."""
(_NUM_REFERENCES_IN_LIST,) = map(getrefcount, [_unshared.untyped_storage()])
"""The same, as `hold_alone` counts them."""


def claims_of(storage: torch.UntypedStorage) -> list[weakref.ref[Record]]:
    """Any thread."""
    claims: list[weakref.ref[Record]] = storage.__dict__.get(CLAIMS_ATTRIBUTE, [])
    return claims


def claim(record: Record, storage: torch.UntypedStorage) -> None:
    """The record's source is an alias of `storage`."""
    attributes = storage.__dict__
    claims: Claims | None = attributes.get(CLAIMS_ATTRIBUTE)
    if claims is None:
        claims = attributes[CLAIMS_ATTRIBUTE] = Claims()
    elif len(claims) > claims.clean_at:
        claims.clean()
    claims.append(weakref.ref(record))
    record.claims = claims
    record.storage_id = storage._cdata


def is_claimed(storage: torch.UntypedStorage) -> bool:
    """Whether a living record, of any store, holds an alias of the storage. Any thread."""
    claims = claims_of(storage)
    for reference in claims:
        record = reference()
        if record is not None and record.claims is claims and record() is not None:
            return True
    return False


def unclaim(record: Record) -> None:
    """The record's source is no longer an alias of the storage that it has claimed."""
    record.claims = None


def records_over(storage: torch.UntypedStorage, version: int, residency: object) -> list[tuple[Record, Handle]]:
    """The store's living records, with their handles, that claim the storage and were made at that version of it.

    Not a generator: Python swallows an error that is raised while a generator is closed. If `sys.unraisablehook` keeps
    that error for a report, it keeps the generator's frame, and with it the handle."""
    found = []
    for reference in claims_of(storage):
        record = reference()
        if record is None or record.residency is not residency:
            continue
        if record.version == version or record.num_members > 1:  # members of a group have counters of their own
            handle = record()
            if handle is not None:
                found.append((record, handle))
    return found


def num_owners(storage_id: int) -> int:
    """The number of owners of a living storage that has a Python object; this object is not counted."""
    return storage_use_count(storage_id) - 1


def _num_aliases(claims: Iterable[weakref.ref[Record]]) -> int:
    """How many owners of the storage the stores are: through the records' sources, and what those have handed out.

    A view of another dtype than the source's has its own base, so it counts twice. A view of a member of a group has
    none. One loop without calls: nested graphs claim a storage many times, and each pack looks at some of these."""
    num_aliases = 0
    for reference in claims:
        record = reference()
        handle = record() if record is not None and record.claims is claims else None
        if record is None or handle is None:
            continue
        num_aliases += 1
        if not handle.views:
            continue
        if record.num_members > 1:
            num_aliases += len(handle.views)
            continue
        source = handle.source
        for view in handle.views.values():
            num_aliases += 1 if view._base is source else 2
    return num_aliases


def hold_alone(
    aliases: Sequence[torch.Tensor], storage_ids: Sequence[int], as_saved: Sequence[tuple[int, int, int]]
) -> list[bool]:
    """For each storage, of which one alias is given, whether only its aliases hold it, it has no claims, and is where
    it was saved: see `is_sole_owner`. `as_saved`: how many aliases it has, its address, and its bytes."""
    storages = list(map(torch.Tensor.untyped_storage, aliases))
    num_references = list(map(getrefcount, storages))
    num_uses, addresses = map(storage_use_count, storage_ids), map(storage_address, aliases)
    return [
        saved == (uses - 1, address, nbytes)  # as `num_owners`
        and references == _NUM_REFERENCES_IN_LIST
        and CLAIMS_ATTRIBUTE not in storage.__dict__
        for saved, storage, references, uses, address, nbytes in zip(
            as_saved,
            storages,
            num_references,
            num_uses,
            addresses,
            map(torch.UntypedStorage.nbytes, storages),
            strict=True,
        )
    ]


def is_sole_owner(record: Record) -> bool:
    """Whether only stores hold the storage of the record's source, and its memory is where it was saved; or it is to be
    stored in any case, or its bytes lie in a slot.

    Each storage with claims has one more owner: its own Python object, which carries them (StorageImpl keeps it; torch
    2.11 and 2.13). A storage that was resized or moved since it was saved is managed by somebody else. (FSDP frees
    parameters by `resize_(0)`, without a version bump.)

    To be called only while the record's source holds the storage. A handle, and with it a claim, may die at any moment.
    Owners are counted first, so a claim that goes between the two counts makes the answer "no", never a wrong "yes"."""
    if record.forced or record.slot is not None:
        return True
    handle, claims = record(), record.claims
    if handle is None or claims is None:
        return False
    if record.ranges:  # a batch was solely owned when it was made; since then, others can hold what it has handed out
        return not handle.views
    source = handle.source
    num_owners = storage_use_count(record.storage_id) - 1
    num_claims = 1 if len(claims) == 1 and not handle.views else _num_aliases(claims)
    return (
        num_owners == num_claims
        and storage_address(source) == record.address
        and source.untyped_storage().nbytes() == record.nbytes
        and getrefcount(source.untyped_storage()) == _NUM_REFERENCES_UNSHARED
    )
