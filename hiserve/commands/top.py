"""``hiserve top``: a live board of a running server."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live

from hiserve.bench.online import read_key
from hiserve.commands.top_board import draw
from hiserve.commands.top_frames import Frame, FrameHistory, FrameReader
from hiserve.config import Config
from hiserve.errors import UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
MIN_INTERVAL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser, _: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the command's arguments; it has no use for settings."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"Address of the server (default: {DEFAULT_URL}).")
    parser.add_argument("--api-key-file", type=Path, metavar="PATH", help="File that holds the server's admin key.")
    parser.add_argument(
        "--interval-s", type=_interval, default=1.0, metavar="N", help="Between frames [s] (default: 1)."
    )
    parser.add_argument("--once", action="store_true", help="Print one frame and end.")


def run(_: Config, url: str, api_key_file: Path | None, interval_s: float, once: bool) -> int:
    """Shows the board until Ctrl-C.

    Args:
        url: Of the server.
        api_key_file: Holds its admin key, or None.
        interval_s: Between frames, seconds.
        once: Print one frame.

    Returns:
        The exit status.

    Raises:
        HiserveError: The server cannot be reached, or has gone away.
    """
    key = read_key(api_key_file)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    console = Console(highlight=False)
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        reader = FrameReader(client)
        history = FrameHistory(reader.read())
        if once:
            console.print(draw(history, url, console.width))
            return 0
        with suppress(KeyboardInterrupt), Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(draw(history, url, console.width), refresh=True)
                time.sleep(interval_s)
                history.add(_next(reader))
    return 0


def _next(reader: FrameReader) -> Frame:
    try:
        return reader.read()
    except UnavailableError as error:
        raise UnavailableError(f"the server has gone away: {error.message}") from None


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not value >= MIN_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text} is out of range; the least is {MIN_INTERVAL_S}")
    return value
