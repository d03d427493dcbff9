"""The live page in a real browser, beside a real daemon and a training that uses it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.browser import Tab, open_browser
from tests.daemon.clients import page_of, report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.daemon.training import gradients, make_model, nothing
from tierstore import TierStore

pytestmark = [pytest.mark.slow]

LABEL = '<script>window.hurt = 1</script><img src=x onerror="window.hurt = 2">'


@pytest.fixture
async def tab() -> AsyncIterator[Tab]:
    async with open_browser() as tab:
        yield tab


async def text_of(tab: Tab, selector: str) -> str:
    text = await tab.value(f"document.querySelector({json.dumps(selector)}).textContent")
    assert isinstance(text, str)
    return text


async def shows(tab: Tab, selector: str, value: int) -> None:
    """Returns when the page shows the figure; the test's time limit ends it otherwise."""
    await tab.until(f"document.querySelector({json.dumps(selector)})?.dataset.value === '{value}'")


class Paused:
    """A step of training, around a block: forward is done before it, with what was saved on disk, backward after it."""

    def __init__(self, store: TierStore) -> None:
        self.gradients: list[torch.Tensor] = []
        self._store = store
        self._is_forward_done, self._may_go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._train)

    async def __aenter__(self) -> None:
        self._thread.start()
        await asyncio.to_thread(self._is_forward_done.wait)

    async def __aexit__(self, *_: object) -> None:
        self._may_go_on.set()
        await asyncio.to_thread(self._thread.join)

    def _train(self) -> None:
        model, batch = make_model(0)
        try:
            self.gradients = gradients(model, batch, self._store, self._between)
        finally:
            self._is_forward_done.set()

    def _between(self) -> None:
        self._store.flush()
        self._is_forward_done.set()
        self._may_go_on.wait(60)


async def test_page_shows_a_training_and_a_killed_daemon(
    tab: Tab, start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "other").mkdir()
    options = {"arguments": ["--path", str(tmp_path / "other")], "codec": "none", "grace_seconds": 600}
    daemon = start_daemon(metrics="127.0.0.1:0", **options)
    address = page_of(daemon)
    await tab.look()
    await tab.open(f"http://{address}/")
    await tab.until("document.getElementById('state').textContent === 'live'")
    assert "no client has a session" in await text_of(tab, "#sessions")
    with TierStore.connect(daemon.socket, host_bytes=0, name=LABEL) as store:
        step = Paused(store)
        async with step:
            await _shows_what_is_held(tab, daemon, store)
        await shows(tab, '[data-figure="restored since the start"]', report_of(daemon).totals.restored_bytes)
    model, batch = make_model(0)
    plain = gradients(model, batch, None, nothing)
    assert all(torch.equal(one, other) for one, other in zip(plain, step.gradients, strict=True))
    await tab.until("document.querySelector('#charts path').getAttribute('d').length > 0")
    await _kill_and_start_again(tab, daemon, start_daemon, address, options)
    own = f"http://{address}/"
    assert {url for url in tab.requested if not url.startswith(own)} <= {"about:blank", "data:,"}
    assert tab.complaints == []


async def _shows_what_is_held(tab: Tab, daemon: DaemonProcess, store: TierStore) -> None:
    report = report_of(daemon)
    (session,) = report.sessions
    assert session.disk_bytes > 0
    assert session.disk_bytes == store.stats().disk_bytes
    row = f'#sessions [data-row="{session.session}"]'
    await shows(tab, f'{row} [data-figure="on disk"]', session.disk_bytes)
    await shows(tab, f'{row} [data-figure="records"]', session.num_records)
    await shows(tab, '[data-figure="disk"]', report.disk.disk_bytes)
    await shows(tab, '[data-figure="spilled since the start"]', report.totals.spilled_bytes)
    assert await text_of(tab, f'{row} [data-label="client"]') == LABEL
    assert await text_of(tab, f'{row} [data-label="rank"]') == "3"
    assert await text_of(tab, f'{row} [data-label="process"]') == str(session.pid)
    assert await tab.value("window.hurt === undefined && !document.querySelector('#sessions img, #sessions script')")
    for drive in report.drives or ():
        await shows(tab, f'#drives [data-row="{drive.path}"] [data-figure="on disk"]', drive.disk_bytes)
        await shows(tab, f'#drives [data-row="{drive.path}"] [data-figure="written"]', drive.written_bytes)


async def _kill_and_start_again(
    tab: Tab, daemon: DaemonProcess, start_daemon: StartDaemon, address: str, options: dict[str, object]
) -> None:
    spilled_bytes = report_of(daemon).totals.spilled_bytes
    daemon.kill()
    await tab.until("document.getElementById('state').textContent === 'no answer'")
    complaint = await text_of(tab, "#lost")
    assert complaint.startswith("No answer since ")
    assert await tab.value("/since \\d\\d:\\d\\d:\\d\\d, for 00:00:/.test(document.getElementById('lost').textContent)")
    assert await tab.value("getComputedStyle(document.getElementById('figures')).filter") == "grayscale(1)"
    await shows(tab, '[data-figure="spilled since the start"]', spilled_bytes)
    again = start_daemon(daemon.path, daemon.socket, metrics=address, **options)
    again.wait_until_open()
    await tab.until("document.getElementById('state').textContent === 'live'")
    assert await tab.value("document.getElementById('lost').hidden")
    await shows(tab, '[data-figure="spilled since the start"]', 0)
