"""The dashboard: static files of the package, which read the routes of this server."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hiserve.config.serving import Server
from hiserve.server.routes import Endpoint

FOLDER = Path(__file__).parents[1] / "dashboard"
PAGE = "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
KEY_PLACEHOLDER = b"KEY_MODE"  # in the page
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a browser asks each time; the tag answers
}


class DashboardRoutes:
    """The files. They hold nothing of this server and need no key; the tab has the key for all that they show.

    Args:
        server: Its keys decide which key the page asks for.

    Attributes:
        paths: Paths of the files.
    """

    def __init__(self, server: Server) -> None:
        contents = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
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
        headers = {**HEADERS, "etag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[Path(name).suffix], headers=headers)


def _key_mode(server: Server) -> str:
    """Returns which key the routes of operators need: ``none``, ``key``, or ``absent`` where no key opens them."""
    if server.admin_api_key is None and server.api_key:
        return "absent"
    return "key" if server.admin_api_key is not None or server.metrics_key is not None else "none"
