"""The dashboard in a browser: its figures are the endpoints', its console is empty, keys stay in the tab, keyboards and phones can use it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hiserve.core.usage import CacheUse
from hiserve.ipc.watching import RowFacts, StepRecord, WorkerView
from tests.browser.conftest import Browser
from tests.e2e.live import serve
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.waiting import PATIENCE_S
from tests.unit.server.conftest import TOKENIZER, make_server
from tests.unit.server.tool_replies import SOURCE, TOOL, Trusting, script, serving

pytestmark = pytest.mark.browser

CALL = '<think>\nHm, where?\n</think>\n\nNow.\n<tool_call>\n{"name": "look", "arguments": {"where":   "Oslo"}}\n</tool_call>'
CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
SEED = 3


def step_of(number: int, end_s: float) -> StepRecord:
    return StepRecord(number, end_s - 0.004, end_s, 256, 270, 14, 256, 0, 0, "replay", "decode", 0.001, 0, "")


def row_of(row: int) -> RowFacts:
    return RowFacts(
        row, 10**6 + row, "decode", 1000 + row, 64 * row, "host", 1500, 500, 12, 94, 33, 0, row % 2 > 0, 8, 6
    )


async def readings(page: Any, count: int) -> None:
    """Waits until the page has read the server so often from now on."""
    before = int(await page.evaluate("document.body.dataset.readings ?? 0"))
    await until(page, f"Number(document.body.dataset.readings ?? 0) >= {before + count}")


async def until(page: Any, condition: str) -> None:
    """Waits for a condition in the page; Playwright's own waiting needs ``eval``, which the policy forbids."""
    deadline = time.monotonic() + PATIENCE_S
    while not await page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        await asyncio.sleep(0.05)


async def table(page: Any, name: str) -> list[list[str]]:
    cells: list[list[str]] = await page.eval_on_selector_all(f"#{name} tbody tr", CELLS)
    return [[cell for cell in row if cell] for row in cells]


def number(text: str) -> int:
    return int(text.replace(",", ""))


class Endpoints:
    """The server's figures, read without the page."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._samples: dict[str, float] = {}
        for line in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                self._samples[series] = float(value)

    def get(self, path: str) -> Any:
        return httpx.get(self._url + path, timeout=PATIENCE_S).raise_for_status().json()

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], int]:
        """Samples above 0 by the values of labels."""
        found = {}
        for series, value in self._samples.items():
            if series.startswith(f"hiserve:{name}{{") and value:
                of = dict(part.split("=") for part in series[series.index("{") + 1 : -1].split(","))
                found[tuple(of[label].strip('"') for label in labels)] = int(value)
        return found


async def test_figures_are_those_of_the_endpoints(browser: Browser, tmp_path: Path) -> None:
    flags = ("--host-cache-gib", "0.1", "--kv-pages", "60", "--max-model-len", "512", "--cpu-threads", "1")
    with serve(tmp_path, *flags) as live:
        page = await browser.open(f"{live.url}/dashboard")
        await readings(page, 1)
        rng = np.random.default_rng(SEED)
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as http:
            for turn in range(6):
                messages = [{"role": "user", "content": f"I need a train on day {turn % 3}, please. {rng.integers(9)}"}]
                await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 40})
                prompt = rng.integers(7, 4096, 300).tolist()
                await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
        live.wait_idle()
        await readings(page, 4)  # one of four reads the tree
        now = Endpoints(live.url)
        gate = {(row[0], row[1]): number(row[-1]) for row in await table(page, "gate")}
        assert gate == now.by("graph_gate_total", "decision", "reason")
        misses = {(row[0],): number(row[-1]) for row in await table(page, "misses")}
        assert misses == now.by("cache_misses_total", "reason") and len(misses) >= 2
        parts = {(row[0], row[1]): (number(row[2]), number(row[3])) for row in await table(page, "parts")}
        chats, tokens = (now.by(f"chat_{name}_total", "part", "turn") for name in ("cache_misses", "missed_tokens"))
        assert parts == {key: (count, tokens[key]) for key, count in chats.items()} and parts
        copies = {row[0]: [number(text) for text in row[2:6]] for row in await table(page, "copies")}
        names = ("wanted", "fulfilled")
        for at, counts in enumerate(now.by(f"cache_{name}_tokens_total", "copy") for name in names):
            assert {(copy,): row[at] for copy, row in copies.items() if row[at]} == counts and counts
        drafts = {(row[0],): [number(text) for text in row[1:4]] for row in await table(page, "drafts")}
        for at, name in enumerate(("drafts", "draft_tokens", "accepted_tokens")):
            assert {key: row[at] for key, row in drafts.items() if row[at]} == now.by(
                f"spec_decode_num_{name}_total", "cache_source"
            )
        (replica,) = now.get("/cache/stats")["replicas"]
        for row in await table(page, "tiers"):
            tier = replica["tiers"][row[0]]
            held = tier["num_pages"] - tier["num_free"] - tier["num_evictable"]
            told = [tier["num_pages"], held, tier["num_evictable"], tier["num_free"], tier["num_evicted"]]
            assert list(map(number, row[1:])) == told
        (tree,) = now.get("/cache/tree?depth=4")["replicas"]
        shown = await page.eval_on_selector_all(
            "[role=treeitem]", "all => all.map(it => [it.dataset.digest, Number(it.children[2].dataset.tokens)])"
        )
        assert sorted(map(tuple, shown)) == sorted((node["digest"], node["num_tokens"]) for node in tree["nodes"])
        (steps,) = now.get("/debug/steps")["replicas"]
        assert steps["steps"][-1]["num_rows"] >= 0
        line = await page.inner_text("#step-line")
        assert line.startswith(f"step {steps['steps'][-1]['step']} · ")
        assert await page.inner_text("#figure-running") == "0"
        async with page.expect_download() as download:
            await page.click("#trace")
        trace = json.loads(Path(await (await download.value).path()).read_text())
        slices = [event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"]
        assert slices == [step["step"] for step in steps["steps"]]
        await browser.close(page)  # before the server, which would refuse it


async def test_256_rows_are_shown_as_they_are(browser: Browser) -> None:
    async with serving("Hi", template=SOURCE) as server, browser.listening(server.app) as url:
        server.engine.views = [WorkerView(0, 1, 9.0, [row_of(row) for row in range(1, 257)], [step_of(5, 9.0)])]
        page = await browser.open(f"{url}/dashboard")
        await readings(page, 2)
        rows = await table(page, "rows")
        assert len(rows) == 256
        for row, cells in enumerate(rows, 1):
            grammar = ["yes"] if row % 2 else []
            told = [str(row), str(10**6 + row), "decode", f"{1000 + row:,}", f"{64 * row:,}", "host", "1,500"]
            assert cells == [*told, "500", "12", "94", "33", "75.0 %", *grammar]
        words = "step 5 · 4.00 ms · replay decode · 256 rows · 270 tokens · 14 of prompts · 256 drawn · masks 1.00 ms"
        assert await page.inner_text("#step-line") == words


async def test_a_chat_shows_thoughts_calls_and_the_cached_prefix(browser: Browser) -> None:
    async with serving("", vetting=Trusting()) as server, browser.listening(server.app) as url:
        server.engine.script = lambda prompt: script("It rains." if "mist" in TOKENIZER.decode(prompt) else CALL, 2)
        server.engine.cached = lambda prompt: CacheUse(device=4, host=8)
        page = await browser.open(f"{url}/dashboard#playground")
        await page.click("summary >> text=System and tools")
        await page.fill("#tools", json.dumps([TOOL]))
        await page.fill("#say", "How is <b>Oslo</b>?")
        await page.press("#say", "Enter")
        await page.wait_for_selector(".turn form")
        assert await page.inner_text(".turn.user .text") == "How is <b>Oslo</b>?", "a text became HTML"
        assert (await page.text_content(".thought")).strip() == "Hm, where?"
        assert await page.inner_text(".call strong") == "look"
        assert json.loads(await page.inner_text(".call code")) == {"where": "Oslo"}
        prompt = server.engine.seen[0].prompt
        usage = page.locator(".usage").first
        assert await usage.get_attribute("data-cached") == "12"
        assert await usage.get_attribute("data-prompt") == str(prompt.size)
        assert "cached 12 (4 device, 8 host)" in await usage.inner_text()
        await usage.locator("summary").click()
        marked = await usage.locator("mark").text_content()
        assert marked == TOKENIZER.decode(prompt[:12], skip_hidden=False)
        await page.fill(".turn textarea", "mist")
        await page.click("text=Send results")
        await until(page, "document.querySelectorAll('.usage:not([hidden])').length === 2")
        assert "It rains." in await page.locator(".turn.assistant").last.inner_text()
        later = TOKENIZER.decode(server.engine.seen[1].prompt, skip_hidden=False)
        assert "mist" in later and "Oslo" in later


async def test_a_reply_can_be_stopped_and_errors_are_told(browser: Browser) -> None:
    async with serving("So it goes, on and on.", template=SOURCE) as server, browser.listening(server.app) as url:
        page = await browser.open(f"{url}/dashboard#playground")
        await page.click("summary >> text=System and tools")
        await page.fill("#tools", "[{]")
        await page.fill("#say", "Hi")
        await page.press("#say", "Enter")
        await page.wait_for_selector(".error")
        assert not server.engine.seen and "JSON" in await page.inner_text(".error")
        await page.click("#clear")
        assert await page.locator(".turn").count() == 0


async def test_the_key_stays_in_its_tab_and_in_one_header(browser: Browser) -> None:
    keys = {"api_key": ("alpha",), "admin_api_key": "root"}
    async with serving("Hi", template=SOURCE, **keys) as server, browser.listening(server.app) as url:
        page = await browser.open(f"{url}/dashboard")
        assert await page.is_visible("#key-form")
        assert not [path for _, path, _ in browser.requests if "/debug" in path or "/metrics" in path]
        await page.fill("#key", "alpha")
        await page.press("#key", "Enter")
        await until(page, "document.querySelector('#key-note').textContent.includes('admin key')")
        await page.wait_for_selector("#key-form:visible")
        refused, browser.told[:] = browser.told[:], []
        assert all("403" in text for text in refused)
        await page.fill("#key", "root")
        await page.press("#key", "Enter")
        await readings(page, 1)
        assert await page.is_hidden("#key-form") and await page.input_value("#key") == ""
        assert not [path for _, path, _ in browser.requests if "root" in path or "alpha" in path]
        assert {given for _, path, given in browser.requests if path.endswith("/debug/rows")} <= {
            "Bearer alpha",
            "Bearer root",
        }
        assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        other = await page.context.new_page()
        await other.goto(f"{url}/dashboard")
        assert await other.is_visible("#key-form"), "another tab knew the key"


async def test_a_page_that_is_paused_or_elsewhere_asks_nothing(browser: Browser) -> None:
    async with serving("Hi", template=SOURCE) as server, browser.listening(server.app) as url:
        page = await browser.open(f"{url}/dashboard")
        await readings(page, 1)
        for stop, go_on in (("#pause", "#pause"), ("#tab-playground", "#tab-engine")):
            await page.click(stop)
            await page.wait_for_timeout(300)  # what was asked before is answered
            before = len(browser.requests)
            await page.wait_for_timeout(1500)
            assert len(browser.requests) == before
            await page.click(go_on)
            await readings(page, 1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_needs_no_sideways_scrolling_and_texts_have_contrast(browser: Browser, scheme: str) -> None:
    async with serving("Hi", template=SOURCE) as server, browser.listening(server.app) as url:
        server.engine.views = [WorkerView(0, 1, 9.0, [row_of(row) for row in range(1, 9)], [step_of(5, 9.0)])]
        page = await browser.open(f"{url}/dashboard", width=390, scheme=scheme)
        await readings(page, 1)
        for tab in ("#tab-playground", "#tab-engine"):
            await page.click(tab)
            assert await page.evaluate("document.documentElement.scrollWidth") == 390
        read = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
        for ink in ("--ink", "--dim", "--bad"):
            for ground in ("--pane", "--bg", "--soft"):
                ratio = contrast(await page.evaluate(read, ink), await page.evaluate(read, ground))
                assert ratio >= 4.5, (scheme, ink, ground, ratio)


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, ``#rgb`` or ``#rrggbb``, as WCAG defines it."""

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(digit * 2 for digit in color[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


async def test_a_keyboard_reaches_views_steps_and_the_tree(browser: Browser, tmp_path: Path) -> None:
    from hiserve.ipc.cache_stats import NodeFacts

    async with serving("Hi", template=SOURCE) as server, browser.listening(server.app) as url:
        server.engine.views = [WorkerView(0, 1, 9.0, [], [step_of(4, 8.5), step_of(5, 9.0)])]
        server.engine.nodes = [
            NodeFacts("aa" * 8, "", 0, 0, "", 1, 0, 12, 1),
            NodeFacts("bb" * 8, "aa" * 8, 1, 32, "DH", 1, 0, 12, 1),
            NodeFacts("cc" * 8, "bb" * 8, 2, 16, "H", 0, 0, 11, 0),
        ]
        page = await browser.open(f"{url}/dashboard")
        await readings(page, 1)
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        seen = set()
        for _ in range(12):
            await page.keyboard.press("Tab")
            seen.add(await page.evaluate("document.activeElement.id || document.activeElement.getAttribute('role')"))
        assert {"tab-engine", "pause", "trace", "steps-chart", "depth", "treeitem"} <= seen, seen
        await page.focus("#steps-chart")
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowLeft")
        assert (await page.inner_text("#step-line")).startswith("step 4 ·")
        await page.focus("[role=treeitem]")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("ArrowLeft")
        assert await page.locator("[role=treeitem]").count() == 2
        assert await page.evaluate("document.activeElement.ariaExpanded") == "false"
        await page.keyboard.press("Enter")
        assert await page.locator("[role=treeitem]").count() == 3
        await page.focus("#tab-engine")
        await page.keyboard.press("ArrowRight")
        assert await page.is_visible("#say") and await page.is_hidden("#engine")


async def test_a_server_that_loads_its_model_says_so_and_is_asked_nothing_else(browser: Browser) -> None:
    loaded = asyncio.Event()

    async def start() -> FakeEngineClient:
        await loaded.wait()
        return engine

    engine = FakeEngineClient(script=lambda prompt: [])
    server = make_server(engine, start=start)
    async with server.app.router.lifespan_context(server.app), browser.listening(server.app) as url:
        page = await browser.open(f"{url}/dashboard")
        await until(page, "document.querySelector('#state').textContent === 'the model is loading'")
        assert not [path for _, path, _ in browser.requests if "/debug" in path]
        loaded.set()
        await readings(page, 1)
        assert (await page.inner_text("#state")).startswith("ready")


async def test_a_server_that_goes_and_comes_back_is_told_of(browser: Browser) -> None:
    async with serving("Hi", template=SOURCE) as server, browser.listening(server.app) as url:
        page = await browser.open(f"{url}/dashboard")
        await readings(page, 1)
        await page.context.set_offline(True)
        await page.wait_for_selector("#notice:visible")
        assert await page.inner_text("#notice") == "The server does not answer."
        await page.context.set_offline(False)
        await page.wait_for_selector("#notice:visible", state="hidden")
        assert all("ERR_INTERNET_DISCONNECTED" in text for text in browser.told)
        browser.told.clear()
