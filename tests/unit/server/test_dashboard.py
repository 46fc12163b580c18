"""The dashboard's files: small, of this server alone, without inline code; they need no key and tell nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hiserve.server.management.pages import DASHBOARD_FOLDER
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server

MOST_BYTES = 150_000
OURS = sorted(
    path for path in DASHBOARD_FOLDER.iterdir() if path.suffix in (".js", ".css", ".html") and "uPlot" not in path.name
)


def made(**settings: Any) -> Server:
    return make_server(FakeEngineClient(script=lambda prompt: []), **settings)


async def test_the_page_and_all_that_it_names_are_served_with_a_strict_policy(server: Server) -> None:
    page = await server.get("/dashboard")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text))
    named |= {f"dashboard/{name}" for path in OURS for name in re.findall(r'from "\./([\w.]+)"', path.read_text())}
    assert len(named) > 10
    for path in ("/dashboard", *(f"/{name}" for name in sorted(named))):
        call = await server.get(path)
        assert call.status == 200, path
        policy = dict(part.strip().split(" ", 1) for part in call.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert call.headers["x-content-type-options"] == "nosniff"
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for name in named:
        assert (await server.get(f"/{name}")).headers["content-type"].startswith(types[Path(name).suffix])


def test_the_files_are_small_and_the_library_has_its_licence() -> None:
    assert sum(path.stat().st_size for path in DASHBOARD_FOLDER.iterdir()) <= MOST_BYTES
    assert "MIT" in (DASHBOARD_FOLDER / "uPlot.LICENSE").read_text()


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_nothing_is_inline_nothing_comes_from_elsewhere_and_no_text_becomes_html(path: Path) -> None:
    text = path.read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "eval(",
        "new Function",
        "document.cookie",
        "localStorage",
    ):
        assert word not in text
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=\"|url\(|@import", text)
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


async def test_a_browser_asks_again_and_is_told_that_nothing_changed(server: Server) -> None:
    for path in ("/dashboard", "/dashboard/app.js"):
        first = await server.get(path)
        assert first.headers["cache-control"] == "no-cache"
        again = await server.call("GET", path, **{"if-none-match": first.headers["etag"]}).end()
        assert (again.status, again.text) == (304, "")
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert (await server.call("GET", path, **{"if-none-match": '"other"'}).end()).status == 200


@pytest.mark.parametrize("name", ["none.js", "..", "%2e%2e%2fapp.py", "uPlot.LICENSE", "", "app.js/", "a" * 5000])
async def test_what_is_no_file_of_it_is_not_found(server: Server, name: str) -> None:
    call = await server.get(f"/dashboard/{name}")
    assert (call.status, call.json["error"]["code"]) == (404, "not_found")


async def test_files_are_read_and_not_written(server: Server) -> None:
    for path in ("/dashboard", "/dashboard/app.js"):
        assert (await server.post(path, b"")).status == 405


async def test_the_start_page_leads_to_it(server: Server) -> None:
    assert '<a href="/dashboard">' in (await server.get("/")).text


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "none"),
        ({"api_key": ("alpha",)}, "absent"),
        ({"admin_api_key": "root"}, "key"),
        ({"api_key": ("alpha",), "admin_api_key": "root"}, "key"),
        ({"metrics_key": "numbers"}, "key"),
    ],
)
async def test_the_page_needs_no_key_tells_which_it_wants_and_names_no_model(settings: Any, mode: str) -> None:
    server = made(**settings)
    page = await server.get("/dashboard")
    assert (page.status, re.findall(r'data-key="(\w+)"', page.text)) == (200, [mode])
    assert "tiny" not in page.text
    assert (await server.get("/dashboard/app.js")).status == 200
    assert (await server.get("/dashboard/none.js")).status == (401 if "api_key" in settings else 404)
