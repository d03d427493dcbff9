"""The object that a graph holds in the place of a saved tensor which was handed to a store, and the unpack hook, which
autograd calls with it.

NOTE [The same object]
Backward should get the same as with hooks that do nothing, `lambda tensor: tensor`: down to the class of a tensor and
the attributes that somebody set on it, because a function may compute with them. Autograd treats what such hooks return
in two ways (`SavedVariable::unpack` of torch/csrc/autograd/saved_variable.cpp, torch 2.11 and 2.13):

* If the saved tensor requires no gradient, the function gets the very object. So we hand out that object, as long as
  somebody else keeps it alive. The store cannot hold it: the owners of a storage can be counted, those of an object
  cannot. Once the object has died, its bytes come back in a new one, but what was set on it would be lost. So a tensor
  of a subclass, and one that has attributes when it is packed, is kept itself, where it is (`Kept` in `select.py`).
  Two nodes that saved one tensor must get one object even then: autograd copies what a function of the user's returns
  as its gradient only if the other node refers to that very object (NOTE [Stolen gradients] in `handing_out.py`). Each
  tracked tensor has its own alias, so such a function gets the record's, which is the same for all of them.
* If it requires gradients, the function gets a new tensor over the same memory, of no subclass and without attributes
  (unless a `__torch_dispatch__` makes them). So it does not matter which alias of the saved tensor we hand out.
"""

from __future__ import annotations

import torch

from tierstore.errors import ModifiedInPlaceError
from tierstore.residency.tracked import TrackedTensor
from tierstore.tensors.layout import Layout, alias_of, describe, is_same_view, outside_of_modes
from tierstore.tensors.torch_names import is_in_own_function, name_of_node, storage_use_count, while_tracing
from tierstore.tensors.uncompiled import traceable, uncompiled

from .below import Packed
from .living import keep_layouts
from .order import PackLog
from .traced import check_unchanged, traced_saved, with_lazy_bits

_EMPTY = torch.empty(0, device="cpu")
_USES_ALONE = 2
"""Of a storage that one alias has: that, and the storage's own Python object."""


@traceable
def unpack(packed: Packed) -> torch.Tensor:
    """The unpack hook of all our scopes: called by autograd with what a pack hook of ours has returned."""
    if torch.compiler.is_dynamo_compiling():
        return packed.traced()
    return packed.unpack()


class SavedTensor(TrackedTensor):
    """What a graph has of a saved tensor: an alias while it is only tracked, then a geometry over a record's bytes."""

    __slots__ = ()

    log: PackLog

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """Waits only if its bytes are not in memory. Raises what `TierStore.get` raises."""
        alias, log = self.alias, self.log
        if alias is None or log.residency.guard.closed is not None:
            if self.handle is None:
                log.residency.saving.register(self)
            alias = log.fetch(self.index, self.layout)
        else:
            if alias._version != self.version:
                check_unchanged(alias, self.version)
            index = self.index
            if index < 0:
                index = log.residency.saving.index_of(self)
            if log.started and not log.large_nodes:
                log.asked[index] = None  # as `asked_for`, without its call
            else:
                log.asked_for(index)
            device = self.device
            if device is not None and (
                log.order.is_followed or log.residency.current_stream(device) != self.stream
            ):  # else there is nothing to bring back, and the stream is known
                log.pass_by(self.index, device)
        if self.itself is None:
            return alias
        itself = self.itself()
        if itself is None:
            if self.handle is None and storage_use_count(self.storage_id) > _USES_ALONE and is_in_own_function():
                log.residency.saving.register_over(self.storage_id)
                return log.fetch(self.index, self.layout)
            return alias
        return alias if itself.requires_grad and not is_same_view(itself, alias) else itself

    def traced(self) -> torch.Tensor:
        """Looks at nothing that depends on where the bytes are: NOTE [Layouts for traces] in `living.py`."""
        while_tracing(keep_layouts)
        layout = self.layout
        counter, version = self._own_counter()
        tensor = traced_saved(self.log.number, self.index, counter, version, self.device, *layout[:4])
        return with_lazy_bits(tensor, layout.conj, layout.neg)

    def _own_counter(self) -> tuple[torch.Tensor | None, int]:
        """A tensor whose version must be the given one when the traced graph runs; (None, 0): the record has it."""
        return None, 0


class RejoinedTensor(SavedTensor):
    """A tensor over restored bytes that was saved again; it shares the record that they were restored from.

    It may have a version counter of its own (from `.data`, or `unsafe_chunk`), whose changes the record's counter does
    not see. So its own counter is kept too, without the memory."""

    __slots__ = ("_guard",)

    _guard: torch.Tensor

    def guard(self, tensor: torch.Tensor, layout: Layout) -> None:
        with outside_of_modes():
            self._guard = alias_of(tensor, layout)
            self._guard.data = _EMPTY

    @uncompiled
    def unpack(self) -> torch.Tensor:
        version = self._guard._version
        if version != self.version:
            raise ModifiedInPlaceError(describe(self.layout), self.version, version, name_of_node())
        return super().unpack()

    def _own_counter(self) -> tuple[torch.Tensor | None, int]:
        return self._guard, self.version
