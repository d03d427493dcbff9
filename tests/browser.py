"""A real Chromium without a window, driven by the DevTools protocol. Where there is none, tests are skipped."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

__all__ = ["Tab", "open_browser"]

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root may not have; the tests open only what they have made
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-port=0",
    "about:blank",
)


class Tab:
    """One page of the browser.

    Attributes:
        requested: addresses that the page has asked for.
        complaints: exceptions of its scripts, and what its policy has refused.
    """

    def __init__(self, websocket: Any) -> None:
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._websocket = websocket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None

    async def listen(self) -> None:
        """Take in what the browser says, until it is closed."""
        async for message in self._websocket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._note(said.get("method", ""), said.get("params", {}))

    async def attach(self) -> None:
        """Open a page, and watch it."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Carry out a method of the protocol; its result."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        session = {} if self._session is None else {"sessionId": self._session}
        await self._websocket.send_json({"id": number, "method": method, "params": parameters, **session})
        async with asyncio.timeout(_SECONDS):
            answer = await self._answers[number]
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def open(self, address: str) -> None:
        """Go there; returns when the page is loaded."""
        await self.call("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What the page's own script would get; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Return when the condition is true in the page."""
        look = f"const look = () => ({condition}) ? resolve(true) : setTimeout(look, 20); look();"
        await self.value(f"new Promise(resolve => {{ {look} }})")

    async def look(self, *, width: int = 1400, height: int = 1000, scheme: str = "light") -> None:
        """Change the window's size and the user's preferred scheme of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _note(self, method: str, said: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["source"] == "security":
            self.complaints.append(said["entry"]["text"])


@asynccontextmanager
async def open_browser() -> AsyncIterator[Tab]:
    """Start a browser with one page. It ends with the block, with all processes that it has started."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip(f"there is no browser: none of {', '.join(_PROGRAMS)}")
    aiohttp = pytest.importorskip("aiohttp", reason="aiohttp, which speaks to the browser, is not installed")
    with tempfile.TemporaryDirectory(prefix="ts-browser-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--user-data-dir={profile}",
            *_FLAGS,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            address = await _address_of(process)
            async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as websocket:
                tab = Tab(websocket)
                listening = asyncio.create_task(tab.listen())
                try:
                    await tab.attach()
                    yield tab
                finally:
                    await websocket.close()
                    await listening
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _address_of(process: asyncio.subprocess.Process) -> str:
    """Where the browser takes commands, as it says itself."""
    assert process.stderr is not None
    async with asyncio.timeout(_SECONDS):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                return found[1]
    raise AssertionError("the browser has ended")
