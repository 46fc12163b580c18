"""Two pages for a person with a browser: ``/`` says what runs here, ``/docs`` describes every route."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

from hiserve import __version__
from hiserve.server.shapes import ServedModel

# Pages load nothing, from nowhere: no scripts, no fonts, no pictures.
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
    "/docs": "every route, with its fields",
    "/openapi.json": "the same as an OpenAPI document",
    "/v1/models": "the model",
    "/ready": "whether requests are served now",
    "/metrics": "Prometheus metrics",
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

    def router(self) -> APIRouter:
        """Returns the routes."""
        router = APIRouter()
        router.add_api_route("/", self.start, methods=["GET", "HEAD"])
        router.add_api_route("/docs", self.docs, methods=["GET"])
        return router

    async def start(self, request: Request) -> Response:
        """Shows the model, links, and a command to try."""
        return _page("hiserve", "".join(self._start(str(request.base_url).rstrip("/"))))

    async def docs(self) -> Response:
        """Describes every route of this server, for people."""
        return _page("hiserve: the API", "".join(_described(self._build())))

    def _start(self, url: str) -> Iterator[str]:
        name = "MODEL" if self._has_keys else self._model.name
        key = " \\\n  -H 'Authorization: Bearer KEY'" if self._has_keys else ""
        said = "This server needs an API key." if self._has_keys else f"Serves <code>{escape(name)}</code>."
        yield f"<h1>hiserve {escape(__version__)}</h1><p>{said}</p><ul>"
        yield from (f'<li><a href="{path}"><code>{path}</code></a>: {what}</li>' for path, what in LINKS.items())
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
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            if method == "head":
                continue
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
            fields = {each["name"]: each["schema"] for each in operation.get("parameters", ())}
            yield from _fields("Parameters", fields, ())
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                schema = schemas[body["$ref"].rpartition("/")[2]]
                yield from _fields("Fields of the body", schema.get("properties", {}), schema.get("required", ()))
            answers = ((status, answer["description"]) for status, answer in operation["responses"].items())
            yield "<p>" + " ".join(f"<code>{status}</code> {escape(words)}" for status, words in answers) + "</p>"


def _fields(title: str, fields: dict[str, Any], required: Any) -> Iterator[str]:
    """Yields a table that can be folded; nothing without fields."""
    if not fields:
        return
    yield f"<details open><summary>{title}</summary><table><tr><th>name</th><th>type</th><th>range</th></tr>"
    for name, schema in fields.items():
        mark = " (required)" if name in required else ""
        cells = f"<td><code>{escape(name)}</code>{mark}</td><td>{escape(_kind(schema))}</td>"
        yield f"<tr>{cells}<td>{escape(_range(schema))}</td></tr>"
    yield "</table></details>"


def _kind(schema: dict[str, Any]) -> str:
    """Returns the type of a field in words."""
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_kind(each) for each in schema[word]))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _range(schema: dict[str, Any]) -> str:
    """Returns the limits of a field in words, those of its alternatives too."""
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "minItems": "items at least",
        "maxItems": "items at most",
        "minLength": "characters at least",
        "maxLength": "characters at most",
        "default": "default",
    }
    found = [f"{word} {schema[name]}" for name, word in words.items() if name in schema]
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found += [limits] if (limits := _range(each)) else []
    return ", ".join(dict.fromkeys(found))
