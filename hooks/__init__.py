"""What autograd saves for backward, handed to a store: `tiered_offload` and its relatives."""

from .module import offload_module
from .offload import tiered_offload
from .resident import keep_resident
from .selective import selective_checkpoint_contexts

__all__ = ["keep_resident", "offload_module", "selective_checkpoint_contexts", "tiered_offload"]
