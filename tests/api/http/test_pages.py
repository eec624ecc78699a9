"""The pages in a headless Chromium: what they show, what they send, and that a model's text stays text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from api_server import KEY, Running, make_state, serve, wait_until
from calling_server import TEMPLATE, LongEngine, prompt, says

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script> & <b>bold</b>'
LONG = "A line of text that goes on.\n" * 100


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, calling: Running) -> Iterator[Page]:
    """The chat page of a server that says what the test wants. Whatever the page loads must come from the server."""
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(10_000)
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(calling.url)
    page.wait_for_selector("#model option", state="attached")
    yield page
    assert all(url.startswith((calling.url, "data:")) for url in loaded), loaded
    context.close()


def ask(page: Page, text: str) -> None:
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def wait_idle(page: Page) -> None:
    page.wait_for_selector("#send:enabled")


def test_a_conversation_by_keyboard(page: Page, calling: Running) -> None:
    says(calling, "Hello, you.")
    assert page.locator("#model option").all_inner_texts() == ["byte-model", "alias"]
    page.locator("#settings summary").click()
    page.get_by_label("System prompt").fill("be kind")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Most tokens").fill("50")
    page.get_by_label("Message").focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    ask(page, "two")
    wait_idle(page)
    assert page.locator("article.assistant .text").inner_text() == "Hello, you."
    assert prompt(calling) == "[system]be kind[user]one\ntwo[assistant]"
    params = calling.engine.requests[-1].params
    assert (params.temperature, params.max_tokens) == (0.25, 50)
    figures = page.locator(".figures").inner_text()
    assert figures.startswith("12 tokens · ")
    assert "tokens/s" in figures
    assert "first token after" in figures
    ask(page, "three")
    wait_idle(page)
    assert prompt(calling) == "[system]be kind[user]one\ntwo[assistant]Hello, you.[user]three[assistant]"
    page.get_by_role("button", name="New chat").click()
    ask(page, "four")
    wait_idle(page)
    assert prompt(calling) == "[system]be kind[user]four[assistant]"
    assert page.locator("article").count() == 2


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop(page: Page, calling: Running, way: str) -> None:
    says(calling, LONG)
    calling.engine.delay = 0.02
    ask(page, "go on")
    page.wait_for_selector("article.assistant .text:not(:empty)")
    if way == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    wait_idle(page)
    assert wait_until(lambda: len(calling.engine.aborted) == 1)
    assert page.locator(".figures").inner_text().endswith("stopped")
    assert page.locator(".error").count() == 0


def test_what_a_model_says_is_text(page: Page, calling: Running) -> None:
    says(calling, f"<think>{HOSTILE}</think>{HOSTILE}")
    ask(page, HOSTILE)
    wait_idle(page)
    assert page.locator("article.assistant > .text").inner_text() == HOSTILE
    assert page.locator("article.user .text").inner_text() == HOSTILE
    page.locator("article details summary").click()
    assert page.locator("article details .text").inner_text() == HOSTILE
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_policy_stops_other_scripts(page: Page) -> None:
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 1\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    page.wait_for_timeout(50)
    assert page.evaluate("window.hacked") is None


def test_errors_are_shown_and_the_conversation_goes_on(page: Page, calling: Running) -> None:
    says(calling, "Fine.")
    page.get_by_label("Message").fill("x" * 5000)
    page.keyboard.press("Enter")
    wait_idle(page)
    assert "maximum context length" in page.get_by_role("alert").inner_text()
    ask(page, "short")
    wait_idle(page)
    assert prompt(calling) == "[user]short[assistant]"
    calling.engine.fail_after, calling.engine.delay = 2, 0.01
    ask(page, "fail")
    wait_idle(page)
    assert page.get_by_role("alert").last.inner_text() == "The step failed."


def test_api_key(browser: Browser) -> None:
    engine = LongEngine()
    for running in serve(make_state(engine, TEMPLATE, api_keys=(KEY,)), engine):
        says(running, "Open.")
        context = browser.new_context()
        page = context.new_page()
        page.goto(running.url)
        page.wait_for_selector(".error")
        assert page.get_by_role("alert").inner_text() == "The API key is missing or wrong."
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Tab")
        page.wait_for_selector("#model option", state="attached")
        page.get_by_label("Message").focus()
        ask(page, "hi")
        wait_idle(page)
        assert page.locator("article.assistant .text").inner_text() == "Open."
        page.goto(f"{running.url}/docs")
        page.wait_for_selector("summary")
        context.close()


CONTRAST = """() => {
  const shine = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return /, 0\\)$/.test(color) ? behind(node.parentElement) : color;
  };
  const found = {};
  for (const node of document.querySelectorAll("button:enabled, label, a, h1, h2, .text, .figures, .error, .keys")) {
    const [low, high] = [shine(getComputedStyle(node).color), shine(behind(node))].sort((a, b) => a - b);
    found[`${node.tagName} ${node.className} ${node.id}`] = (high + 0.05) / (low + 0.05);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(page: Page, calling: Running, scheme: str) -> None:
    """Contrast of at least 4.5, as WCAG's level AA asks."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    ask(page, "hi")
    wait_idle(page)
    calling.engine.full = True
    ask(page, "hi")
    wait_idle(page)
    found = page.evaluate(CONTRAST)
    assert len(found) > 8
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    if folder := os.environ.get("STOKER_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/chat-{scheme}.png")


def test_docs_show_every_operation(page: Page, calling: Running) -> None:
    document = httpx.get(f"{calling.url}/openapi.json").json()
    operations = sum(len(methods) for methods in document["paths"].values())
    page.goto(f"{calling.url}/docs")
    page.wait_for_selector("summary")
    assert page.locator("details").count() == operations
    page.get_by_text("/v1/chat/completions", exact=True).click()
    assert page.get_by_role("cell", name="messages").is_visible()
    if folder := os.environ.get("STOKER_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/docs.png")


def test_pages_need_no_key_and_name_their_script() -> None:
    engine = LongEngine()
    for running in serve(make_state(engine, TEMPLATE, api_keys=(KEY,)), engine):
        for path in ("/", "/docs"):
            answer = httpx.get(running.url + path)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert "script-src 'sha256-" in answer.headers["content-security-policy"]
            assert "http://" not in answer.text
            assert "https://" not in answer.text
