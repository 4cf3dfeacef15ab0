"""The page at /, in a real browser where there is one (Chromium, with playwright)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Live
from tests.serve.test_chat import CALL, WEATHER

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_needs_nothing_from_elsewhere(text_server: Live) -> None:
    answer = text_server.http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(", answer.text)


@pytest.fixture
def page() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.set_default_timeout(20_000)
        yield page
        browser.close()
    assert problems == []


def test_a_conversation_in_a_browser(scripted: Callable[..., Live], page: Any, tmp_path: Path) -> None:
    live = scripted(
        {"hi": f"so it is\n</think>\n<b>forty</b> two{CALL}"}, tools=[WEATHER], thinking=True, max_model_len=4096
    )
    page.goto(live.url)
    page.wait_for_selector("#model:has-text('test')")
    page.fill("#tools", json.dumps([WEATHER]))
    page.fill("#temperature", "0")
    seen: list[str] = []
    page.expose_function("saw", lambda text: seen.append(text))
    page.evaluate(
        "new MutationObserver(() => saw(document.querySelector('.content')?.textContent || ''))"
        ".observe(document.getElementById('talk'), { childList: true, subtree: true, characterData: true })"
    )
    page.fill("#prompt", "hi")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".call pre")
    page.wait_for_selector("#send:not([disabled])")
    assert page.text_content(".assistant .content") == "<b>forty</b> two", "text is text, not HTML"
    assert len({text for text in seen if text}) > 2, "it came in pieces"
    assert page.text_content(".reasoning pre") == "so it is"
    assert not page.locator(".reasoning pre").is_visible(), "folded away"
    page.click(".reasoning summary")
    assert page.locator(".reasoning pre").is_visible()
    assert page.text_content(".call summary") == "Tool call: weather"
    assert '"Rome"' in page.text_content(".call pre")
    assert "time to first token" in page.text_content("#last")
    assert "reference arm" in page.text_content("#last")
    page.wait_for_selector("#live tr:has-text('state slots') td:has-text('0 of')")
    page.screenshot(path=str(tmp_path / "page.png"))


def test_stopping_and_errors_in_a_browser(
    scripted: Callable[..., Live], page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = scripted({"hi": [100] * 1900}, thinking=True)
    page.goto(live.url)
    page.fill("#max_tokens", "1800")
    page.fill("#prompt", "hi")
    page.click("#send")
    page.wait_for_selector(".reasoning")
    page.click("#stop")
    page.wait_for_selector("#send:not([disabled])")
    live.settle()
    assert live.service.engine.stats().num_decode_tokens < 1800, "the server stopped, too"


def test_a_model_without_a_chat_template(page: Any, shipped_server: Live) -> None:
    page.goto(shipped_server.url)
    page.wait_for_selector("#mode option[disabled]", state="attached")
    page.fill("#max_tokens", "4")
    page.fill("#prompt", "Call me")
    page.click("#send")
    page.wait_for_selector("#last tr:has-text('output tokens') td:text-is('4')")
    assert page.text_content(".assistant .content")
