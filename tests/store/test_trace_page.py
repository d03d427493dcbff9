"""The page of a trace in a real browser: steps to choose from, budgets, colours, and the verdict on memory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.browser import Tab, open_browser
from tests.command_line import Command, command_of, record_two_steps

pytestmark = [pytest.mark.slow]

COUNT_PIXELS = """(() => {
  const colour = getComputedStyle(document.documentElement).getPropertyValue("--limit").trim().slice(1);
  const wanted = [0, 2, 4].map(at => parseInt(colour.slice(at, at + 2), 16));
  const canvas = document.getElementById("lanes");
  const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < bytes.length; i += 4) {
    count += wanted.every((each, at) => bytes[i + at] === each);
  }
  return count;
})()"""
"""How many pixels have the colour of budgets."""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Of a trace with two steps."""
    command: Command = command_of("trace", monkeypatch, capsys)
    page = tmp_path / "page.html"
    done = command("view", record_two_steps(tmp_path), "--step=2", f"--html={page}")
    assert done.returncode == 0, done.stderr
    return page


@pytest.fixture
async def tab() -> AsyncIterator[Tab]:
    async with open_browser() as tab:
        yield tab


async def visible_titles(tab: Tab) -> list[str]:
    titles = await tab.value("[...document.querySelectorAll('section:not([hidden]) h1')].map(each => each.textContent)")
    assert isinstance(titles, list)
    return titles


async def test_page_lets_its_reader_choose_a_step_and_draws_budgets_in_light_and_dark(tab: Tab, page: Path) -> None:
    await tab.look()
    await tab.open(page.as_uri())
    assert await visible_titles(tab) == ["Step 2 of 2"]
    options = await tab.value("[...document.getElementById('picker').options].map(each => each.textContent)")
    assert [option.split(":")[0] for option in options] == ["1", "2"]
    assert all("waited" in option for option in options)
    assert await tab.value("document.getElementById('picker').value") == "2"
    heads = await tab.value("[...document.querySelectorAll('th')].map(each => each.textContent)")
    assert heads == ["time", "forward", "backward", "disk", "written", "read"]
    before = await tab.value("document.getElementById('lanes').toDataURL()")
    change = "picker.value = '1'; picker.dispatchEvent(new Event('change'))"
    await tab.value(f"(() => {{ const picker = document.getElementById('picker'); {change}; }})()")
    assert await visible_titles(tab) == ["Step 1 of 2"]
    assert await tab.value("document.getElementById('lanes').toDataURL()") != before
    words = await tab.value("document.querySelector('section:not([hidden])').textContent")
    assert all(each in words for each in ("Threads waited", "% of the step.", "duration", "written", "MiB/s"))
    assert {url for url in tab.requested if url != page.as_uri()} <= {"about:blank", "data:,"}
    assert tab.complaints == []
    seen = set()
    for scheme in ("light", "dark"):
        for width in (1400, 400):
            await tab.look(width=width, scheme=scheme)
            await tab.open(page.as_uri())
            assert await tab.value(COUNT_PIXELS) > 20, "the words, where the budget is far above what is held"
            assert await tab.value("document.documentElement.scrollWidth") <= width
            assert (
                await tab.value(
                    "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(document.querySelector('.tables'))"
                )
                == 0
            )
        seen.add(await tab.value("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
