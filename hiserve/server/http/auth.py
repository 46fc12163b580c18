"""API keys: the caller of a request, its rights, and its namespace in the cache."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from hiserve.config.serving import Server
from hiserve.core.digest import namespace_digest
from hiserve.errors import AuthenticationError, ForbiddenError


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request.

    Attributes:
        key: Digest of the API key; empty without one.
        tenant: Separates callers in the cache: ``key``, or empty where all callers share.
        is_admin: The key is the admin key.
        number: Position of the key among the server's keys, from 1; 0 without a key.
    """

    key: bytes = b""
    tenant: bytes = b""
    is_admin: bool = False
    number: int = 0


class Auth:
    """Checks keys.

    Args:
        server: Keys, and whether callers share prefixes.
    """

    def __init__(self, server: Server) -> None:
        self._keys = [_digest(key.encode()) for key in server.api_key]
        self._admin_key = None if server.admin_api_key is None else _digest(server.admin_api_key.encode())
        self._metrics_key = None if server.metrics_key is None else _digest(server.metrics_key.encode())
        self._shares_prefixes = server.share_prefixes

    def caller(self, authorization: bytes) -> Caller:
        """Returns the caller of a request by its ``Authorization`` header.

        The duration does not depend on the number of equal bytes, nor on the position of the key.

        Args:
            authorization: Value of the header; empty without one.

        Raises:
            AuthenticationError: The server has keys and the header has none of them.
        """
        scheme, _, given = authorization.strip().partition(b" ")
        digest = _digest(given.strip())
        is_bearer = scheme.lower() == b"bearer"
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        is_admin = hmac.compare_digest(digest, self._admin_key or bytes(len(digest))) and is_bearer
        if is_admin or (any(matches) and is_bearer):
            number = max(number * is_it for number, is_it in enumerate((*matches, is_admin), 1))
            tenant = b"" if self._shares_prefixes else digest
            return Caller(key=digest, tenant=tenant, is_admin=is_admin, number=number)
        if self._keys:
            fault = "this API key is not known" if authorization else "the request carries no API key"
            raise AuthenticationError(f"{fault}; send 'Authorization: Bearer KEY' with a key of this server.")
        return Caller()

    def is_admin(self, request: Request) -> bool:
        """Whether the request may affect all tenants: it has the admin key, or the server has no keys."""
        return caller_of(request).is_admin or (self._admin_key is None and not self._keys)

    def sees_metrics(self, request: Request) -> bool:
        """Whether the request may read the metrics of requests: with the metrics key or the admin key, or if there are no keys.

        Raises:
            AuthenticationError: The request has an unknown key.
        """
        if not self._keys and self._metrics_key is None:
            return True
        authorization = _authorization(request.scope)
        scheme, _, given = authorization.strip().partition(b" ")
        digest, is_bearer = _digest(given.strip()), scheme.lower() == b"bearer"
        matches = [
            hmac.compare_digest(digest, key or bytes(len(digest))) for key in (self._metrics_key, self._admin_key)
        ]
        if is_bearer and any(matches):
            return True
        if authorization:
            self.caller(authorization)
        return False

    def require_admin(self, request: Request) -> None:
        """Refuses a request that may not affect all tenants.

        Raises:
            AuthenticationError: The server has an admin key and the request has no key.
            ForbiddenError: The request has another key, or the server has no admin key.
        """
        if self.is_admin(request):
            return
        path = request.url.path
        if self._admin_key is None:
            raise ForbiddenError(f"{path} affects all tenants; start the server with --admin-api-key to use it.")
        if not caller_of(request).key:
            raise AuthenticationError(f"{path} needs the admin key; send 'Authorization: Bearer KEY'.")
        raise ForbiddenError(f"{path} affects all tenants; it needs the admin key.")

    def tags(self, rid: str) -> list[str]:
        """Returns the tags that requests of this name have, one for each possible caller."""
        keys = [b"", *self._keys, *([self._admin_key] if self._admin_key else [])]
        return [_tag(key, rid) for key in keys]


class AuthMiddleware:
    """Refuses requests without a known key, and records the caller of the others.

    Args:
        app: The application that gets the requests.
        auth: Checks the keys.
        public: Paths that need no key: those of watchdogs, load balancers, Prometheus and a browser's first look. Every
            other path needs one, also a path without a route.
    """

    def __init__(self, app: ASGIApp, auth: Auth, public: frozenset[str]) -> None:
        self._app = app
        self._auth = auth
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on.

        Raises:
            AuthenticationError: Its key is missing or unknown, and its path is not public.
        """
        if scope["type"] == "http":
            is_public = scope["path"] in self._public
            caller = Caller() if is_public else self._auth.caller(_authorization(scope))
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Returns the caller of a request."""
    caller = request.state.caller
    assert isinstance(caller, Caller), "the request was not authenticated"
    return caller


def namespace_of(request: Request, cache_salt: str | None = None) -> bytes:
    """Returns the namespace of a request's cached prefixes; empty without key and salt.

    Requests of two keys never share a namespace, whatever their salts.

    Args:
        request: An authenticated request.
        cache_salt: Field of the request; without lone surrogates.
    """
    tenant = caller_of(request).tenant
    if not tenant and not cache_salt:
        return b""
    return namespace_digest("tenant", tenant, cache_salt or "")


def tag_of(request: Request, rid: str | None = None) -> str:
    """Returns the tag by which only the caller of a request can abort it.

    Args:
        request: An authenticated request.
        rid: Field of the body; the default is the ``x-request-id``.
    """
    return _tag(caller_of(request).key, rid or request.state.request_id)


def _authorization(scope: Scope) -> bytes:
    """Returns the value of the header, or that of ``x-api-key`` in its form; empty without either."""
    given = _header(scope, b"authorization")
    key = b"" if given else _header(scope, b"x-api-key")
    return b"Bearer " + key if key else given


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")


def _tag(key: bytes, rid: str) -> str:
    return f"{key.hex()}:{rid}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
