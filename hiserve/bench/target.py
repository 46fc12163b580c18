"""What a server says about itself, what it does besides generating, and how it counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hiserve.bench.http import Pool
from hiserve.bench.load_client import Client, words_of
from hiserve.bench.scrape import page_size_of, scrape
from hiserve.bench.workload import Sample
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError, ModelError, NotFoundError, UnavailableError
from hiserve.models.model_config import NANO, find_model, read_model_config
from hiserve.text.tokenizer import Tokenizer

FLUSH_ROUTES = ("/flush_cache", "/reset_prefix_cache")
# Characters of the text that a server without /tokenize counts as a prompt.
PROBE_CHARS = 4000
# Dense text (code, tables) has fewer characters per token than the probe.
ESTIMATE_MARGIN = 1.1


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a server."""

    model: str
    max_model_len: int | None  # tokens of prompt and reply together, or None if the server does not tell
    vocab_size: int | None  # token ids are below it, or None if nobody knows
    version: str | None  # the server's, or None
    device: str | None = None  # where the model runs (``cpu``, ``cuda``), or None if the server does not tell
    page_size: int | None = None  # tokens per page of its cache, or None likewise

    def require_vocab_size(self) -> int:
        """Returns the vocabulary's size. Raises ConfigError."""
        if self.vocab_size is None:
            raise ConfigError(
                "the vocabulary's size is not known: the server does not tell, and its model's folder is not here. "
                "Give --vocab-size.",
                param="vocab_size",
            )
        return self.vocab_size


async def look_at(pool: Pool, *, model: str | None = None, vocab_size: int | None = None) -> Target:
    """Asks a server for one of its models, by default the first it lists. Raises UnavailableError or NotFoundError."""
    status, answer = await pool.ask("GET", "/v1/models")
    cards = answer.get("data") if isinstance(answer, dict) else None
    if status != 200 or not cards:
        remedy = "Give a key with --api-key-file." if status in (401, 403) else "Is --url right?"
        raise UnavailableError(f"the server lists no models: GET /v1/models answered {status}. {remedy}")
    named = [card for card in cards if model in (None, card["id"])]
    if not named:
        raise NotFoundError(f"the server has no model {model!r}; it has {', '.join(card['id'] for card in cards)}.")
    card = named[0]
    told = await _told(pool)
    return Target(
        model=card["id"],
        max_model_len=card.get("max_model_len"),
        vocab_size=vocab_size or told.vocab_size or _vocab_size_of(card.get("root")),
        version=await _version(pool),
        device=told.device,
        page_size=told.page_size or page_size_of(await scrape(pool)),
    )


class _Told(msgspec.Struct, frozen=True):
    """The fields of ``/get_model_info``."""

    vocab_size: int | None = None
    device: str | None = None
    page_size: int | None = None


async def _told(pool: Pool) -> _Told:
    status, answer = await pool.ask("GET", "/get_model_info")
    try:
        return msgspec.convert(answer, _Told) if status == 200 else _Told()
    except msgspec.ValidationError:
        return _Told()


def _vocab_size_of(root: str | None) -> int | None:
    """Reads the vocabulary's size from the model's folder, when that is on this machine; downloads nothing."""
    if not root or not (root == NANO or Path(root).is_dir()):
        return None
    try:
        return read_model_config(find_model(root)).vocab_size
    except ModelError:
        return None


async def _version(pool: Pool) -> str | None:
    for route in ("/server_info", "/version"):
        status, answer = await pool.ask("GET", route)
        if status == 200 and isinstance(answer, dict) and answer.get("version"):
            return str(answer["version"])
    return None


async def flush(pool: Pool) -> None:
    """Empties the server's prefix cache. Raises ConfigError."""
    refusals = []
    for route in FLUSH_ROUTES:
        status, answer = await pool.ask("POST", route)
        if status == 200:
            return
        refusals.append(f"POST {route} answered {status} ({words_of(answer)})")
    raise ConfigError(
        f"the server did not flush its cache: {', '.join(refusals)}. Leave --flush-cache out and restart it instead.",
        param="flush_cache",
    )


class Encoder(Protocol):
    """Makes tokens of texts."""

    async def encode(self, text: str) -> Int32Array:
        """Returns the token ids, special ones around the text included, int32 ``[n]``."""


class Counter(Protocol):
    """Counts the tokens of texts."""

    is_exact: bool

    async def count(self, text: str) -> int:
        """Returns the number of tokens, special ones around the text included; never less than the truth."""


class TokenizerCounter:
    """Counts with the ``tokenizer.json`` of a folder."""

    is_exact = True

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.load(folder)

    async def encode(self, text: str) -> Int32Array:
        return self._tokenizer.encode(text, add_special_tokens=True)

    async def count(self, text: str) -> int:
        return int((await self.encode(text)).size)


class ServerCounter:
    """Lets the server count."""

    is_exact = True

    def __init__(self, pool: Pool, model: str) -> None:
        self._pool = pool
        self._model = model

    async def encode(self, text: str) -> Int32Array:
        return np.array((await self._ask(text))["tokens"], dtype=np.int32)

    async def count(self, text: str) -> int:
        return int((await self._ask(text))["count"])

    async def _ask(self, text: str) -> dict[str, Any]:
        status, answer = await self._pool.ask("POST", "/tokenize", {"model": self._model, "prompt": text})
        if status != 200:
            raise UnavailableError(f"/tokenize answered {status}. Give --tokenizer, the model's folder.")
        return dict(answer)


class EstimatingCounter:
    """Estimates from the tokens per character of one text."""

    is_exact = False

    def __init__(self, tokens_per_char: float) -> None:
        self._tokens_per_char = tokens_per_char * ESTIMATE_MARGIN

    async def count(self, text: str) -> int:
        return int(len(text) * self._tokens_per_char) + 1


async def make_encoder(pool: Pool, target: Target, folder: Path | None) -> Encoder:
    """Chooses what makes tokens of texts as the server does: the tokenizer of a folder, or the server. Raises ConfigError."""
    if folder is not None:
        return TokenizerCounter(folder)
    status, answer = await pool.ask("POST", "/tokenize", {"model": target.model, "prompt": "a"})
    if status == 200 and isinstance(answer, dict) and isinstance(answer.get("tokens"), list):
        return ServerCounter(pool, target.model)
    raise ConfigError(
        f"the server does not tell the tokens of a text: /tokenize answered {status}. Give --tokenizer, the model's "
        "folder.",
        param="tokenizer",
    )


async def make_counter(pool: Pool, client: Client, target: Target, folder: Path | None, text: str) -> Counter:
    """Chooses the most exact counter: a folder's tokenizer, the server, or the usage of a text like those to count."""
    if folder is not None:
        return TokenizerCounter(folder)
    status, answer = await pool.ask("POST", "/tokenize", {"model": target.model, "prompt": "a"})
    if status == 200 and isinstance(answer, dict) and isinstance(answer.get("count"), int):
        return ServerCounter(pool, target.model)
    probe, sample = text[:PROBE_CHARS], Sample()
    await client.send(probe, 1, sample)
    if sample.num_prompt < 1:
        raise UnavailableError(
            f"the server does not tell how long texts are in tokens ({sample.error or 'no usage'}). "
            "Give --tokenizer, the model's folder."
        )
    return EstimatingCounter(sample.num_prompt / len(probe))
