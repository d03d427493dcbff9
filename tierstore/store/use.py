"""Whether a program uses a store as it was meant: a store that is forgotten works, and stores nothing.

The module's only state is how the process used its last stores: a program that opens one in each step has none that
could tell."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from operator import call

from ..base.caller import stacklevel_of_user
from ..errors import TierStoreWarning
from ..tensors.torch_names import sequence_nr

_NUM_STORES = 8
_NUM_GRAPHS = 32
"""So many in a row, which are more than most programs unroll."""

_WHERE = "put forward and the loss inside `with tiered_offload(store):`, with gradients enabled"

_last_stores: deque[Use] = deque(maxlen=_NUM_STORES)


class Use:
    """What was done with one store. Any thread.

    `has_scope`: whether a `tiered_offload` was made for it; `has_backend`: an `offload_backend`. `has_replays`: the
    user was told of outputs of CUDA graphs.
    """

    def __init__(self, name: str) -> None:
        self.has_scope = self.has_backend = self.has_replays = False
        self._name = name
        self._num_graphs = 0
        self._graphs: deque[weakref.ref[object]] | None = deque(maxlen=_NUM_GRAPHS)
        self._thread, self._began_at = threading.get_ident(), sequence_nr()

    def begin(self) -> None:
        """The store is about to be opened. Warns, and may raise that, if each of the last ones had a single graph."""
        if len(_last_stores) == _NUM_STORES and all(
            use._name == self._name and use._num_graphs == 1 for use in _last_stores
        ):
            _last_stores.clear()
            self._warn(
                f"the last {_NUM_STORES} stores there had one graph each. Open one before the loop and use it in every "
                "step: a new one has to be opened, and has learned nothing"
            )
        _last_stores.append(self)

    def note_graph(self, graph: object) -> None:
        """A graph begins. Warns, once, and may raise that, if all the last ones are still alive."""
        self._num_graphs += 1
        graphs = self._graphs
        if graphs is None:
            return
        if len(graphs) == _NUM_GRAPHS and all(map(call, graphs)):
            self._graphs = None
            self._warn(
                f"the graphs of the last {_NUM_GRAPHS} steps are all alive, with what they saved: something keeps a "
                "loss or an output, or backward has retain_graph=True. Keep `loss.item()` or `loss.detach()` instead"
            )
        else:
            graphs.append(weakref.ref(graph))

    def warn_if_nothing_came(self) -> None:
        """The store is closed, and has seen neither a saved tensor nor a `put`. Warns, and may raise that, unless it
        was only looked at: no scope was made for it, and this thread has computed nothing that autograd records."""
        if self.has_backend:
            self._warn(
                "nothing came to the store: no graph that was compiled with offload_backend saved anything that it "
                "can store; see docs/how_to/compile.md"
            )
        elif self._num_graphs:
            self._warn(f"nothing came to the store: autograd saved nothing inside its scopes; {_WHERE}")
        elif self.has_scope:
            self._warn(f"nothing came to the store: its tiered_offload was never entered; {_WHERE}")
        elif self._thread == threading.get_ident() and sequence_nr() != self._began_at:
            self._warn(f"nothing came to the store: it has no scope; {_WHERE}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"<TierStore {self._name}>: {text}", TierStoreWarning, stacklevel=stacklevel_of_user())
