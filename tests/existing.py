"""Setting what belongs to another object: only what it has."""

from typing import Any

__all__ = ["set_existing"]


def set_existing(target: object, **values: Any) -> None:
    """Set attributes that the target has; one that has moved elsewhere would be set in vain.

    Raises:
        AttributeError: it has none of that name; none was set.
    """
    for name in values:
        if not hasattr(target, name):
            raise AttributeError(f"{type(target).__name__} has no attribute {name!r}: setting it would change nothing")
    for name, value in values.items():
        setattr(target, name, value)
