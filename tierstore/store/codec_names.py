"""What `TierStore` takes as `codec`, for type checkers and editors."""

from typing import Literal

Codec = Literal[
    "auto", "none", "floats", "zstd", "shuffle-zstd",
    "zstd:1", "zstd:2", "zstd:3", "zstd:4", "zstd:5", "zstd:6",
    "zstd:7", "zstd:8", "zstd:9", "zstd:10", "zstd:11", "zstd:12",
    "zstd:13", "zstd:14", "zstd:15", "zstd:16", "zstd:17",
    "zstd:18", "zstd:19", "zstd:20", "zstd:21", "zstd:22",
    "shuffle-zstd:1", "shuffle-zstd:2", "shuffle-zstd:3", "shuffle-zstd:4", "shuffle-zstd:5", "shuffle-zstd:6",
    "shuffle-zstd:7", "shuffle-zstd:8", "shuffle-zstd:9", "shuffle-zstd:10", "shuffle-zstd:11", "shuffle-zstd:12",
    "shuffle-zstd:13", "shuffle-zstd:14", "shuffle-zstd:15", "shuffle-zstd:16", "shuffle-zstd:17",
    "shuffle-zstd:18", "shuffle-zstd:19", "shuffle-zstd:20", "shuffle-zstd:21", "shuffle-zstd:22",
]  # fmt: skip
"""The negative levels of zstd, down to -131072, are taken as well; a type checker has to be told (`cast`)."""
