"""The tables at the end of tuning, on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tierstore.tuning.search import Found
from tierstore.tuning.settings import TrialSettings
from tierstore.tuning.tuned import Candidate, Tuned
from tierstore.tuning.views import tuned_view

MIB = 2**20
DEFAULTS = Candidate("defaults", TrialSettings(999 * MIB), 1.9, (1.5, 1.6, 1.4))
AS_IT_IS = Candidate("as it is", TrialSettings(999 * MIB), 1.9, (1.5, 1.6, 1.4))
LONG = TrialSettings(999 * MIB, 112 * MIB, "shuffle-zstd:1", "learned", 999 * MIB, 16)


def _shown(*candidates: Candidate, saved_bytes: int = 300 * MIB, link: str | None = None) -> Sequence[str]:
    shares = (0, 1, 2, 4, 6, 8, 9)
    hosts, lookaheads = [share * saved_bytes // 8 for share in shares], [saved_bytes // 8, None]
    start = candidates[0].settings
    predicted = {replace(start, host_bytes=host, lookahead_bytes=ahead): 1.25 for host in hosts for ahead in lookaheads}
    found = Found(predicted, hosts, lookaheads, start, is_whole=True)
    screen = StringIO()
    reason = f"{candidates[-1].name!r} it is."
    tuned = Tuned("/x", MIB, candidates, candidates[-1], found, reason, link)
    Console(file=screen, width=80).print(tuned_view(tuned))
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("inline_bytes", [128 * 1024, 2**20, None])
@pytest.mark.parametrize("saved_bytes", [300 * MIB, 999 * 2**30])
def test_tables_fit_80_columns_and_cut_no_word(inline_bytes: int | None, saved_bytes: int) -> None:
    settings = replace(LONG, inline_bytes=inline_bytes)
    lines = _shown(
        AS_IT_IS, Candidate("inline 1 MiB", settings, 123.4567, (123.4567, 99.0, 999.9999)), saved_bytes=saved_bytes
    )
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    steps, settings_row = [" ".join(line.split()) for line in lines if line.startswith("inline 1 MiB")]
    assert steps == "inline 1 MiB 123.4567 123.4567 99.0000 to 999.9999 82.30"
    inline = {128 * 1024: "", 2**20: " 1 MiB", None: " all"}[inline_bytes]
    assert settings_row == "inline 1 MiB 999 MiB 112 MiB shuffle-zstd:1 learned 999 MiB 16" + inline


def test_tables_say_which_candidate_failed_and_which_is_above_the_limit() -> None:
    above = Candidate("as it is", LONG, 1.0, (1.0, 1.1, 1.2), is_allowed=False)
    failed = Candidate("found 1", LONG, None, (1.0,), failure="out of memory")
    text = "\n".join(_shown(above, DEFAULTS, failed))
    assert "your settings: more memory than the limit" in text
    assert "found 1 failed: out of memory" in text
    assert "relative to" in text
    assert "as it is" not in text


def test_tables_of_a_step_on_an_accelerator_say_what_stays_there() -> None:
    sized = Candidate("found 1", replace(LONG, device_bytes=999 * 2**30), 1.0, (1.0, 1.1, 1.2))
    found = Candidate("auto", replace(LONG, device_bytes="auto"), None, (1.0, 1.1, 1.2), found_bytes=3 * 2**30)
    lines = _shown(
        DEFAULTS, sized, found, link="copies to the host at 2 GB/s (as recorded), back at 40 GB/s (measured)"
    )
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines]
    place = rows.index("On the accelerator")
    assert rows[place + 1 : place + 5] == [
        "device_bytes found",
        "defaults 0 B -",
        "found 1 999.00 GiB -",
        "auto auto 3.00 GiB",
    ]
    assert "They were simulated with copies to the host at 2 GB/s (as recorded)" in "\n".join(rows)
