"""HTML pages: ``/`` shows the model and links, ``/docs`` describes every route, and the dashboard is static files of the package."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hiserve import __version__
from hiserve.config.serving import Server
from hiserve.server.reply.format import ServedModel
from hiserve.server.request.known_fields import IGNORED, REFUSED
from hiserve.server.routes import Endpoint
from hiserve.text.body.json import Schema, allowed_values, forms

# Pages load no scripts, fonts or pictures.
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'", "cache-control": "no-store"}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "code,pre{font:14px/1.5 ui-monospace,monospace;background:#f4f4f4}code{padding:.1em .3em}"
    "pre{padding:.8em;overflow-x:auto}table{border-collapse:collapse;width:100%}"
    "td,th{border-top:1px solid #ddd;padding:.3em .6em;text-align:left;vertical-align:top}"
    "h2{margin-top:2em}summary{cursor:pointer}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}code,pre{background:#282828}"
    "td,th{border-color:#444}a{color:#8bf}}"
)
LINKS = {
    "/dashboard": "the cache, the running rows, the steps, and a chat",
    "/docs": "every route, with its fields",
    "/openapi.json": "the same as an OpenAPI document",
    "/v1/models": "the model",
    "/ready": "whether requests are served now",
    "/metrics": "Prometheus metrics",
}
DASHBOARD_FOLDER = Path(__file__).parents[1] / "dashboard"
PAGE = "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
KEY_PLACEHOLDER = b"KEY_MODE"  # in the page
DASHBOARD_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a browser asks each time; the tag answers
}


class PageRoutes:
    """The pages.

    Args:
        model: The served model.
        build: Returns the OpenAPI document.
        has_keys: Requests must carry an API key; the start page then does not name the model.
    """

    def __init__(self, model: ServedModel, build: Callable[[], dict[str, Any]], *, has_keys: bool) -> None:
        self._model = model
        self._build = build
        self._has_keys = has_keys

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        return [
            Endpoint("/", self.start, "GET", "HEAD", media="text/html", is_public=True),
            Endpoint("/docs", self.docs, "GET", media="text/html"),
        ]

    async def start(self, request: Request) -> Response:
        """Shows the model, links, and a command to try."""
        return _page("hiserve", "".join(self._start(str(request.base_url).rstrip("/"))))

    async def docs(self, _: Request) -> Response:
        """Describes every route of this server, for people."""
        return _page("hiserve: the API", "".join(_described(self._build())))

    def _start(self, url: str) -> Iterator[str]:
        name = "MODEL" if self._has_keys else self._model.name
        key = " \\\n  -H 'Authorization: Bearer KEY'" if self._has_keys else ""
        said = "This server needs an API key." if self._has_keys else f"Serves <code>{escape(name)}</code>."
        yield f"<h1>hiserve {escape(__version__)}</h1><p>{said}</p><ul>"
        yield from (f'<li><a href="{path}"><code>{path}</code></a>: {content}</li>' for path, content in LINKS.items())
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        command = f"curl {url}/v1/chat/completions{key} \\\n  -H 'Content-Type: application/json' \\\n  -d '{body}'"
        yield f"</ul><p>Try it:</p><pre>{escape(command)}</pre>"


def _page(title: str, content: str) -> Response:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    html = f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{content}</body></html>\n'
    return Response(html, media_type="text/html", headers=HEADERS)


def _described(document: dict[str, Any]) -> Iterator[str]:
    """Yields the content of ``/docs``, made from the OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    yield f'<h1>{escape(info["title"])} {escape(info["version"])}</h1><p><a href="/">back</a></p>'
    yield "<p>A field that is not required may be null, which is as good as leaving it out.</p>"
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            if method == "head":
                continue
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{_prose(operation['summary'])}</p>"
            fields = {each["name"]: each["schema"] for each in operation.get("parameters", ())}
            yield from _fields("Parameters", fields, (), schemas)
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                schema = schemas[body["$ref"].rpartition("/")[2]]
                yield from _fields(
                    "Fields of the body", schema.get("properties", {}), schema.get("required", ()), schemas
                )
            answers = ((status, answer["description"]) for status, answer in operation["responses"].items())
            yield "<p>" + " ".join(f"<code>{status}</code> {escape(words)}" for status, words in answers) + "</p>"


def _prose(text: str) -> str:
    """Returns a sentence of a docstring as HTML, with code for text in backquotes."""
    return re.sub("``(.+?)``", r"<code>\1</code>", escape(text))


def _fields(title: str, fields: dict[str, Any], required: Any, schemas: dict[str, Schema]) -> Iterator[str]:
    """Yields a table, and a folded one of the fields that change nothing; nothing without fields."""
    named = dict(_named(fields, schemas))
    served = {name: schema for name, schema in named.items() if not _is_neutral(name, schema, schemas)}
    neutral = {name: schema for name, schema in named.items() if name not in served}
    others = "Fields of other servers, taken with these values alone: they change nothing"
    for summary, table in ((title, served), (others, neutral)):
        if table:
            is_open = " open" * (table is served)
            yield f"<details{is_open}><summary>{summary}</summary><table><tr><th>name</th><th>values</th></tr>"
            for name, schema in table.items():
                note = " (required)" if name in required else ""
                yield f"<tr><td><code>{escape(name)}</code>{note}</td><td>{escape(allowed_values(schema, schemas))}</td></tr>"
            yield "</table></details>"


def _named(fields: dict[str, Any], schemas: dict[str, Schema], before: str = "") -> Iterator[tuple[str, Schema]]:
    """Yields fields by name, after an object those in it: ``spec``, ``spec.num_steps``."""
    for name, schema in fields.items():
        yield before + name, schema
        for each in forms(schema, schemas):
            yield from _named(each.get("properties", {}), schemas, f"{before}{name}.")


def _is_neutral(name: str, schema: Schema, schemas: dict[str, Schema]) -> bool:
    """Whether a field is accepted only because clients of other servers send it."""
    bare = name.rpartition(".")[2]
    return bare in IGNORED or (bare in REFUSED and all("enum" in form for form in forms(schema, schemas)))


class DashboardRoutes:
    """The dashboard: static files, which read the routes of this server. They hold nothing of this server and need no key; the tab has the key for all that they show.

    Args:
        server: Its keys decide which key the page asks for.

    Attributes:
        paths: Paths of the files.
    """

    def __init__(self, server: Server) -> None:
        contents = {path.name: path.read_bytes() for path in sorted(DASHBOARD_FOLDER.iterdir()) if path.suffix in TYPES}
        contents[PAGE] = contents[PAGE].replace(KEY_PLACEHOLDER, _key_mode(server).encode())
        self._files = {
            name: (content, f'"{hashlib.sha256(content).hexdigest()[:32]}"') for name, content in contents.items()
        }
        self.paths = frozenset(f"/dashboard/{name}" for name in contents)

    def routes(self) -> list[Endpoint]:
        """Returns the routes."""
        return [
            Endpoint("/dashboard", self.page, "GET", media="text/html", is_public=True),
            Endpoint("/dashboard/{file}", self.file, "GET", media="*/*", is_public=True),
        ]

    async def page(self, request: Request) -> Response:
        """Shows the cache, the running rows, the steps and a chat, for people with a browser."""
        return self._reply(request, PAGE)

    async def file(self, request: Request) -> Response:
        """Returns a file of the dashboard."""
        return self._reply(request, request.path_params["file"])

    def _reply(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        content, tag = self._files[name]
        headers = {**DASHBOARD_HEADERS, "etag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[Path(name).suffix], headers=headers)


def _key_mode(server: Server) -> str:
    """Returns which key the routes of operators need: ``none``, ``key``, or ``absent`` where no key opens them."""
    if server.admin_api_key is None and server.api_key:
        return "absent"
    return "key" if server.admin_api_key is not None or server.metrics_key is not None else "none"
