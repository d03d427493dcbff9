"""All targets, by name."""

from tests.fuzz import encoded, frames, index_records, options
from tests.fuzz.target import Target

__all__ = ["TARGETS"]

TARGETS: dict[str, Target] = {
    target.name: target for module in (frames, index_records, encoded, options) for target in module.TARGETS
}
