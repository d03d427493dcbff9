"""The protocol under one name, for tests that speak it by hand: the messages, and the frames that carry them."""

from tierstore.sidecar.frames import *  # noqa: F403
from tierstore.sidecar.messages import *  # noqa: F403
