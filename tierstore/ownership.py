"""Who else holds a storage? The question behind "may we take these bytes away".

Taking a storage's bytes to disk frees memory only if nobody but the store holds it, and only then are the bytes
sure not to change. The count of a storage's owners is compared with the aliases that stores of this process hold.

Those are written down on the storage's own Python object (PyTorch keeps that object, and its attributes, for as
long as the storage lives), so a list of claims can never be mistaken for that of another storage which got the
same address, and it needs no table that somebody would have to clean up.
"""

from __future__ import annotations

import weakref
from sys import getrefcount

import torch

from .handle import Handle, Record
from .torch_names import storage_address, storage_use_count

__all__ = [
    "Claims",
    "claim",
    "claims_of",
    "is_sole_owner",
    "num_owners",
    "records_over",
    "unclaim",
]

Claims = list["weakref.ref[Record]"]
"""The records, of any store, that hold or held an alias of one storage."""

_ATTRIBUTE = "_tierstore_claims"
_unshared = torch.empty(0)
_NUM_REFERENCES_UNSHARED = getrefcount(_unshared.untyped_storage())
"""To a living storage's Python object, as `is_sole_owner` counts them, when nobody else refers to it."""


def claims_of(storage: torch.UntypedStorage) -> Claims:
    """The claims on a storage; empty where there are none. Any thread."""
    claims: Claims = storage.__dict__.get(_ATTRIBUTE, [])
    return claims


def claim(record: Record, storage: torch.UntypedStorage) -> None:
    """Note that the record's source is an alias of `storage`."""
    attributes = storage.__dict__
    claims: Claims | None = attributes.get(_ATTRIBUTE)
    if claims is None:
        claims = attributes[_ATTRIBUTE] = []
    elif len(claims) > 8:
        claims[:] = [ref for ref in claims if _num_aliases(ref, claims)]
    claims.append(weakref.ref(record))
    record.claims = claims
    record.storage_id = storage._cdata


def unclaim(record: Record) -> None:
    """The record's source is no alias of that storage any more."""
    record.claims = None


def records_over(storage: torch.UntypedStorage, version: int, books: object) -> list[tuple[Record, Handle]]:
    """The living records of a store, and their handles, that claim a storage and were made at that version of it.

    No generator: if something is raised as it is closed, Python swallows it, and whoever keeps that error for a report
    (`sys.unraisablehook`) keeps the generator's frame, and with it the handle.

    Args:
        books: the store's.
    """
    found = []
    for reference in claims_of(storage):
        record = reference()
        if record is not None and record.books is books and record.version == version:
            handle = record()
            if handle is not None:
                found.append((record, handle))
    return found


def num_owners(storage_id: int) -> int:
    """Of a living storage, whose Python object was asked for: how many there are, that object not counted."""
    return storage_use_count(storage_id) - 1


def _num_aliases(ref: weakref.ref[Record], claims: Claims) -> int:
    """How many tensors over the storage the record keeps: its source, and what it has handed out."""
    record = ref()
    if record is None or record.claims is not claims or record.source is None:
        return 0
    return 1 + _num_view_aliases(record)


def _num_view_aliases(record: Record) -> int:
    """What was handed out: a view of another dtype than the source's has a base of its own."""
    source = record.source
    return sum(1 if view._base is source else 2 for view in record.views.values())


def is_sole_owner(record: Record) -> bool:
    """Whether only stores hold the storage of the record's source, and it is the one that was saved.

    One more owner is counted in every storage that has claims: its own Python object, which carries them
    (StorageImpl keeps it; torch 2.11 and 2.13). A storage that was resized or moved since (FSDP frees parameters
    by `resize_(0)`, without a version bump) is managed by somebody else.

    Only while the record's source holds the storage. A handle, and with it a claim, may die at any moment: the owners
    are counted first, so that a claim which goes between the two counts makes the answer "no", never "yes".
    """
    source, claims = record.source, record.claims
    if source is None or claims is None:
        return False
    num_owners = storage_use_count(record.storage_id) - 1
    if len(claims) == 1:
        num_claims = 1 + _num_view_aliases(record) if record.views else 1
    else:
        num_claims = sum(_num_aliases(ref, claims) for ref in claims)
    return (
        num_owners == num_claims
        and storage_address(source) == record.address
        and getrefcount(source.untyped_storage()) == _NUM_REFERENCES_UNSHARED
    )
