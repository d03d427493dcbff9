"""The tables at the end of tuning, on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tierstore.tuning.present import tuned_view
from tierstore.tuning.search import Found
from tierstore.tuning.settings import TrialSettings
from tierstore.tuning.tuned import Candidate, Tuned

MIB = 2**20
DEFAULTS = Candidate("defaults", TrialSettings(999 * MIB), 1.9, (1.5, 1.6, 1.4))
AS_IT_IS = Candidate("as it is", TrialSettings(999 * MIB), 1.9, (1.5, 1.6, 1.4))
LONG = TrialSettings(999 * MIB, 112 * MIB, "shuffle-zstd:1", "learned", 999 * MIB, 16)


def _shown(*candidates: Candidate, link: str | None = None) -> Sequence[str]:
    start = candidates[0].settings
    found = Found({start: 1.25}, [start.host_bytes], [None], start, is_whole=True)
    screen = StringIO()
    reason = f"{candidates[-1].name!r} it is."
    tuned = Tuned("/x", MIB, candidates, candidates[-1], found, reason, link)
    Console(file=screen, width=80).print(tuned_view(tuned))
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("link", [None, "copies to the host at 2 GB/s, back at 40 GB/s"])
def test_tables_fit_80_columns_and_cut_no_word(link: str | None) -> None:
    settings = replace(LONG, device_bytes="auto")
    slow = Candidate("found 4", settings, 123.4567, (123.4567, 99.0, 999.9999), found_bytes=999 * 2**30)
    lines = _shown(AS_IT_IS, slow, link=link)
    assert max(map(len, lines)) <= 80
    assert not any("\u2026" in line for line in lines)
    steps, settings_row = [" ".join(line.split()) for line in lines if line.startswith("found 4")]
    assert steps == "found 4 123.4567 123.4567 99.0000 to 999.9999 82.30"
    held = "" if link is None else " 999.00 GiB"
    assert settings_row == "found 4 999 MiB 112 MiB shuffle-zstd:1 learned 16" + held
    assert (f"They were simulated with {link}." in lines) == (link is not None)


def test_tables_say_which_candidate_failed_and_which_is_above_the_limit() -> None:
    above = Candidate("as it is", LONG, 1.0, (1.0, 1.1, 1.2), is_allowed=False)
    failed = Candidate("found 1", LONG, None, (1.0,), failure="out of memory")
    text = "\n".join(_shown(above, DEFAULTS, failed))
    assert "your settings: more memory than the limit" in text
    assert "found 1 failed: out of memory" in text
    assert "relative to" in text
    assert "as it is" not in text
