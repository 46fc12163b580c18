"""``hiserve chat``: a conversation in the terminal, with a server of its own or a given one."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from hiserve.config.flags import flag_of
from hiserve.config.options import Options, flags, without_secrets
from hiserve.errors import HiserveError, ResourceError, UnavailableError

TEMPERATURE = 0.7
STOP_S = 10.0
PR_SET_PDEATHSIG = 1
# A model may write any character; the terminal must not obey it.
INVISIBLE = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
HELP = "/reset forgets the conversation, /stats shows counters, /exit leaves"


class ReplyStats(msgspec.Struct, kw_only=True):
    """One reply, measured by the client.

    Attributes:
        text: The reply.
        finish: Its finish reason.
        ttft_s: Seconds to the first event with text; 0 without one.
        total_s: Seconds to the end.
        num_prompt: Tokens in the prompt.
        num_cached: Of these, served from the cache.
        num_generated: Tokens generated.
    """

    text: str = ""
    finish: str = "abort"
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, the first token left out."""
        span = self.total_s - self.ttft_s
        return (self.num_generated - 1) / span if span > 0 and self.num_generated > 1 else 0.0


def stats_lines(turns: Sequence[ReplyStats], workers: Sequence[dict[str, Any]]) -> list[str]:
    """Returns five lines: this conversation, then requests, cache, hits and drafts of all workers together.

    Args:
        turns: Of this conversation.
        workers: As ``/server_info`` lists them.
    """
    num_prompt = sum(turn.num_prompt for turn in turns)
    num_cached = sum(turn.num_cached for turn in turns)
    stats = [worker["stats"] for worker in workers]
    running, waiting, steps, computed = (
        sum(each.get(name, 0) for each in stats) for name in ("running", "waiting", "steps", "prompt_tokens")
    )
    caches = [each.get("cache") or {} for each in stats]
    tiers, hits = [], []
    for tier in ("device", "host", "store"):
        sizes = [cache[tier] for cache in caches if cache.get(tier)]
        total, free = (sum(size.get(name, 0) for size in sizes) for name in ("num_pages", "num_free"))
        tiers.append(f"{tier} {_pages(total, free, tier)}" if sizes else f"no {tier}")
        hits.append(f"{tier} {sum((cache.get('cached_tokens') or {}).get(tier, 0) for cache in caches):,}")
    return [
        f"conversation: {len(turns)} turns, {num_prompt:,} prompt tokens, {_share(num_cached, num_prompt)} cached, "
        f"{sum(turn.num_generated for turn in turns):,} generated",
        f"server: {len(workers)} worker{'s'[: len(workers) != 1]}, {running:,} running, {waiting:,} waiting, {steps:,} steps",
        f"cache: {', '.join(tiers)}",
        f"prompt tokens from the cache: {', '.join(hits)}, of {computed:,}",
        _drafts_line([use for each in stats for use in ((each.get("drafts") or {}).get("by_source") or {}).values()]),
    ]


def _pages(total: int, free: int, tier: str) -> str:
    return f"{total:,} pages" if tier == "store" else f"{total - free:,} of {total:,} pages"


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole if whole else 0:.0f} %)"


def _drafts_line(uses: Sequence[dict[str, Any]]) -> str:
    """Returns a line about the drafts; ``uses`` are those of each worker and source."""
    proposed, accepted, steps = (sum(use[name] for use in uses) for name in ("proposed", "accepted", "verify_steps"))
    if not steps:
        return "drafts: none verified"
    return f"drafts: {_share(accepted, proposed)} of {proposed:,} accepted, {1 + accepted / steps:.2f} tokens a verifying step"


def add_arguments(parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the command's own arguments, then the settings of the server it may start."""
    parser.add_argument("--url", metavar="URL", help="Talk to this server instead of starting one.")
    add_settings(parser)


def run(config: Options, url: str | None) -> int:
    """Talks until ``/exit`` or the end of the input.

    Args:
        config: For the server that is started when there is no ``url``.
        url: A running server, or None.

    Returns:
        The exit status: 1 when a turn failed and standard input is no terminal.

    Raises:
        HiserveError: The server cannot be started or reached.
    """
    console = Console(highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        if url is None:
            with console.status("loading the model") if console.is_terminal else contextlib.nullcontext():
                url = stack.enter_context(own_server(config))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=httpx.Timeout(10.0, read=None)))
        return ChatSession(console, client).talk()


class ChatSession:
    """The messages so far, and the commands.

    Args:
        console: Where to write; questions are read from standard input.
        client: Bound to the server.
    """

    def __init__(self, console: Console, client: httpx.Client) -> None:
        self._console = console
        self._client = client
        self._model = self._ask("GET", "/v1/models")["data"][0]["id"]
        self._messages: list[dict[str, str]] = []
        self._turns: list[ReplyStats] = []

    def talk(self) -> int:
        """Reads and answers until the end; returns the exit status."""
        is_watched = sys.stdin.isatty()
        if is_watched:
            self._console.print(f"[dim]{escape(self._model)}. {HELP}[/dim]")
        status = 0
        for line in self._lines(is_watched):
            if line == "/exit":
                break
            try:
                self._obey(line)
            except HiserveError as error:
                self._console.print(f"[red]{escape(error.message)}[/red]")
                status = 0 if is_watched else 1
        return status

    def _lines(self, is_watched: bool) -> Iterator[str]:
        """Yields lines of input that are not empty."""
        while True:
            try:
                line = self._console.input("[bold]> [/bold]") if is_watched else input()
            except (EOFError, KeyboardInterrupt):
                return
            if line.strip():
                yield line.strip()

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self._messages.clear()
            self._console.print("[dim]the conversation is forgotten[/dim]")
        elif line == "/stats":
            self._show_stats()
        elif line.startswith("/"):
            self._console.print(f"[dim]{HELP}[/dim]")
        else:
            self._answer(line)

    def _answer(self, question: str) -> None:
        """Streams one reply; a reply cut short by Ctrl-C stays in the conversation."""
        self._messages.append({"role": "user", "content": question})
        turn = ReplyStats()
        try:
            self._stream(turn)
        except HiserveError:
            self._messages.pop()
            raise
        except KeyboardInterrupt:
            self._console.print(" [dim](stopped)[/dim]", end="")
        self._console.print()
        self._messages.append({"role": "assistant", "content": turn.text})
        self._turns.append(turn)
        self._console.print(
            f"[dim]first token {turn.ttft_s * 1000:.0f} ms · {turn.tokens_per_s:.1f} tokens/s · "
            f"{turn.num_prompt} prompt tokens, {turn.num_cached} cached · {turn.num_generated} generated · "
            f"{turn.finish}[/dim]"
        )

    def _stream(self, turn: ReplyStats) -> None:
        body = {
            "model": self._model,
            "messages": self._messages,
            "temperature": TEMPERATURE,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin = time.monotonic()
        try:
            with reaching_server(), self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                check(response)
                for event in events(response):
                    self._take(turn, event, time.monotonic() - begin)
        finally:
            turn.total_s = time.monotonic() - begin

    def _take(self, turn: ReplyStats, event: dict[str, Any], elapsed_s: float) -> None:
        if "error" in event:
            raise UnavailableError(event["error"]["message"])
        for choice in event["choices"]:
            delta = choice["delta"]
            turn.finish = choice["finish_reason"] or turn.finish
            for name, style in (("reasoning_content", "dim"), ("content", None)):
                text = delta.get(name, "")
                if text and name == "content" and turn.ttft_s and not turn.text:
                    self._console.out("\n", end="")  # the thought ends here
                turn.ttft_s = turn.ttft_s or (elapsed_s if text else 0.0)
                turn.text += text if name == "content" else ""
                self._console.out(text.translate(INVISIBLE), end="", style=style, highlight=False)
        if event.get("usage"):
            turn.num_prompt = event["usage"]["prompt_tokens"]
            turn.num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            turn.num_generated = event["usage"]["completion_tokens"]

    def _show_stats(self) -> None:
        for line in stats_lines(self._turns, self._ask("GET", "/server_info")["workers"]):
            self._console.print(f"[dim]{escape(line)}[/dim]")

    def _ask(self, method: str, path: str) -> Any:
        with reaching_server():
            response = self._client.request(method, path)
        check(response)
        return response.json()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yields the JSON of each event until ``[DONE]``."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def check(response: httpx.Response) -> None:
    """Raises the server's error.

    Raises:
        UnavailableError: The status is not 200.
    """
    if response.status_code != 200:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"the server answered {response.status_code}; is it hiserve?"
        raise UnavailableError(message)


@contextlib.contextmanager
def reaching_server() -> Iterator[None]:
    """Turns network errors into one clear message.

    Raises:
        UnavailableError: The server cannot be reached, or it went away.
    """
    try:
        yield
    except httpx.HTTPError as error:
        raise UnavailableError(f"cannot reach the server: {str(error).rstrip('.')}.") from None


@contextlib.contextmanager
def own_server(config: Options) -> Iterator[str]:
    """Starts ``hiserve serve`` on a free port and stops it at the end; yields its URL.

    The server is in a session of its own, so that Ctrl-C ends a reply and not the server, and the kernel
    stops it when this process dies.

    Raises:
        ResourceError: It did not start; it has printed the error.
    """
    code = "import sys; from hiserve.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        *arguments_of(config),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--log-level",
        "warning",
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        assert child.stdout is not None, "stdout is a pipe"
        for line in child.stdout:
            if line.startswith("listening on "):
                yield line.removeprefix("listening on ").strip()
                return
        raise ResourceError("the server did not start.")
    finally:
        stop(child)


def arguments_of(config: Options) -> list[str]:
    """Returns the arguments of ``serve`` that make ``config``, but for the address and the logging."""
    config = without_secrets(config)  # other users of the machine see arguments
    given = [config.model.model]
    for name, flag in flags().items():
        value = getattr(getattr(config, flag.section), name)
        if value == flag.default or name in ("model", "host", "port", "log_level"):
            continue
        given += [flag_of(name)] if flag.kind == "bool" else [flag_of(name), str(value)]
    return given


def stop(child: subprocess.Popen[str]) -> None:
    """Ends the server: asks first, kills after a while."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
