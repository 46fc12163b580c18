"""``hiserve serve``: the API process, which starts the engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette

from hiserve import __version__
from hiserve.config.options import Options
from hiserve.config.serving import Server
from hiserve.config.settings import Settings
from hiserve.core.digest import namespace_digest
from hiserve.core.endpoints import MAX_PORT
from hiserve.core.resolve import Resolved
from hiserve.errors import ResourceError
from hiserve.grammar.vet import Vetting
from hiserve.ipc.child import LOG_FORMAT
from hiserve.launch import prepare
from hiserve.models.config_fields import read_json
from hiserve.models.model_config import ModelConfig
from hiserve.scheduler.client import EngineClient
from hiserve.server.app import create_app
from hiserve.server.engine_handle import EngineHandle
from hiserve.server.http.connection import HttpConnection
from hiserve.server.metrics.registry import Metrics
from hiserve.server.reply.format import ServedModel
from hiserve.text.frontend import load_frontend

# If a server closes a connection earlier than the client would, the client's next request fails.
KEEP_ALIVE_S = 75
CLOSE_S = 5
BACKLOG = 2048
# The kernel ends a connection whose client has acknowledged nothing for this time.
PEER_TIMEOUT_S = 60
KEEP_IDLE_S = 30
# Of one stream: some thirty thousand tokens, fewer with scores.
MAX_UNREAD_BYTES = 2**20

logger = logging.getLogger(__name__)


def run(options: Options) -> int:
    """Serves until a signal: SIGTERM drains, a second one or SIGINT stops at once.

    Prints ``listening on http://host:port`` when the model is ready.

    Args:
        options: As given.

    Returns:
        The exit status.

    Raises:
        HiserveError: The model, the configuration, the port or the engine's start.
    """
    logging.basicConfig(level=options.server.log_level.upper(), format=LOG_FORMAT)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with bind(options.server.host, options.server.port) as listener:
        warn_if_open(listener, options.server)
        app, handle, _ = assemble(options, MAX_UNREAD_BYTES)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(app, handle, listener, drain_timeout_s=options.server.drain_timeout_s))


def assemble(options: Options, max_unread_bytes: int | None = None) -> tuple[Starlette, EngineHandle, Settings]:
    """Returns the application, its engine, which has not started, and the settings.

    Args:
        options: As given.
        max_unread_bytes: As for ``EngineClient.start``.

    Raises:
        HiserveError: The model or the configuration.
    """
    begin = time.monotonic()
    launch = prepare(options)
    launch.log()
    settings = launch.identified()
    handle = EngineHandle(lambda: EngineClient.start(settings, max_unread_bytes=max_unread_bytes))
    resolved = msgspec.structs.replace(launch.resolved, settings=settings)
    return build_app(handle, launch.folder, launch.model, resolved, begin=begin), handle, settings


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Called before the model is loaded, so that a port in use is found at once.

    Args:
        host: Name or address.
        port: 0 picks a free one.

    Raises:
        ResourceError: The address is in use, not of this machine, or not allowed.
    """
    if port > MAX_PORT:
        raise ResourceError(f"cannot listen on port {port}; the largest is {MAX_PORT}.", param="port")
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The connections inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT_S * 1000)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(
                f"port {port} on {host} is in use. Stop the program that uses it or choose another --port.",
                param="port",
            ) from None
        raise ResourceError(
            f"cannot listen on {host} port {port}: {error}. Choose another --host or --port.", param="host"
        ) from None
    return listener


def warn_if_open(listener: socket.socket, server: Server) -> None:
    """Warns if other machines can send requests without a key."""
    host = listener.getsockname()[0]
    if not ipaddress.ip_address(host).is_loopback and not server.api_key:
        logger.warning("listening on %s without --api-key: whoever reaches this address can use the server", host)


def build_app(handle: EngineHandle, folder: Path, model: ModelConfig, resolved: Resolved, *, begin: float) -> Starlette:
    """Loads tokenizer and chat template, and builds the application.

    Args:
        handle: Starts the engine.
        folder: The model's folder.
        model: Its shape.
        resolved: The settings in force.
        begin: ``time.monotonic()`` when start-up began.

    Raises:
        ModelError: The tokenizer or the chat template cannot be used.
    """
    settings = resolved.settings
    configured = time.monotonic()
    folder_name = Path(settings.model.model).expanduser().resolve().name
    name = settings.server.served_model_name or settings.model.shape or folder_name
    frontend = load_frontend(settings.model, folder, model)
    if frontend.template is None:
        logger.warning("the model has no chat template: /v1/chat/completions is off, /v1/completions works")
    encoder = frontend.prompt_encoder()
    encoder.prepare()
    digest = namespace_digest(__version__, name, settings.model.dtype, settings.model.load_format)
    return create_app(
        handle=handle,
        encoder=encoder,
        vetting=Vetting(folder, model.vocab_size, model.eos_token_ids, settings.scheduler.max_queued_requests),
        token_bytes=frontend.token_bytes,
        abilities=frontend.abilities,
        metrics=Metrics(name, page_size=settings.cache.page_size, compat=settings.server.metrics_compat),
        model=ServedModel(
            name=name,
            root=settings.model.model,
            vocab_size=model.vocab_size,
            created=int(time.time()),
            fingerprint=f"hiserve-{digest.hex()[:12]}",
            defaults=frontend.default_sampling,
            spec_steps=settings.spec.tiers[-1],
            page_size=0 if settings.cache.disable_prefix_cache else settings.cache.page_size,
            end_token_ids=model.eos_token_ids,
        ),
        resolved=resolved,
        tokenizer_info=tokenizer_info(folder),
        startup_s={"configuration": configured - begin, "tokenizer": time.monotonic() - configured},
    )


def tokenizer_info(folder: Path) -> bytes:
    """Returns the model's ``tokenizer_config.json``, which is in a form that JSON readers take; empty without one.

    Raises:
        ModelError: It is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    return json.dumps(read_json(path) if path.is_file() else {}).encode()


class _Server(uvicorn.Server):
    """uvicorn, with its signal handling left to ``serve``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures nothing."""
        yield


async def serve(app: Starlette, handle: EngineHandle, listener: socket.socket, *, drain_timeout_s: float) -> int:
    """Serves until a signal, drains, stops the engine, closes the connections.

    Args:
        app: The application; its lifespan starts the engine.
        handle: Holds the engine.
        listener: A listening socket.
        drain_timeout_s: Seconds after a signal for open requests to end, and for cached pages to reach slower tiers.

    Returns:
        The exit status, 0.

    Raises:
        HiserveError: The engine did not start.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
    )
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    copy_until_s = 0.0

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set() or number == signal.SIGINT:
            stop_now.set()
        stop.set()

    def on_end(_: object) -> None:  # not expected before a signal
        stop.set()
        stop_now.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(on_end)
    try:
        if await _unless(stop, handle.wait_open()):
            print(f"listening on {url_of(listener)}", flush=True)
            await stop.wait()
            handle.drain()
            copy_until_s = loop.time() + drain_timeout_s
            if stop_now.is_set():
                logger.info("stopping: open requests end now")
            else:
                logger.info("draining: open requests have %g s to finish", drain_timeout_s)
            with contextlib.suppress(TimeoutError):  # the others are aborted below
                await asyncio.wait_for(_unless(stop_now, _idle(handle)), drain_timeout_s)
    finally:
        if not stop_now.is_set():
            await _unless(stop_now, handle.close(max(0.0, copy_until_s - loop.time())))
        await handle.close()
        server.should_exit = True
        await serving
    return 0


def url_of(listener: socket.socket) -> str:
    """Returns the address of a listening socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs ``work`` and cancels it if ``event`` is set first; returns whether it ended."""
    tasks: tuple[asyncio.Task[Any], ...] = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
            return True
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _idle(handle: EngineHandle) -> None:
    """Returns as soon as no request is in the engine."""
    while handle.engine is not None and handle.engine.num_inflight:
        await asyncio.sleep(0.02)
