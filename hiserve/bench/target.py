"""A server's model, its routes besides generation, and counters of its tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hiserve.bench.http import Pool
from hiserve.bench.load_client import Client, words_of
from hiserve.bench.scrape import page_size_of, scrape
from hiserve.bench.workload import Sample
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError, ModelError, NotFoundError, UnavailableError
from hiserve.models.model_config import NANO, find_model, read_model_config
from hiserve.text.tokens.tokenizer import Tokenizer

FLUSH_ROUTES = ("/flush_cache", "/reset_prefix_cache")
# Characters of the text that a server without /tokenize counts as a prompt.
PROBE_CHARS = 4000
# Dense text (code, tables) has fewer characters per token than the probe.
ESTIMATE_MARGIN = 1.1


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a server."""

    model: str
    max_model_len: int | None  # tokens of prompt and reply together, or None if the server does not tell
    vocab_size: int | None  # token ids are below it, or None if unknown
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
    info = await _told(pool)
    return Target(
        model=card["id"],
        max_model_len=card.get("max_model_len"),
        vocab_size=vocab_size or info.vocab_size or _vocab_size_of(card.get("root")),
        version=await _version(pool),
        device=info.device,
        page_size=info.page_size or page_size_of(await scrape(pool)),
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


class Encoder(msgspec.Struct, frozen=True):
    """Makes tokens of texts, special ones around the text included, int32 ``[n]``."""

    encode: Callable[[str], Awaitable[Int32Array]]


class Counter(msgspec.Struct, frozen=True):
    """Counts the tokens of texts, special ones around the text included; never less than the truth."""

    count: Callable[[str], Awaitable[int]]
    is_exact: bool = True


def _encoder_of(folder: Path) -> Encoder:
    tokenizer = Tokenizer.load(folder)

    async def encode(text: str) -> Int32Array:
        return tokenizer.encode(text, add_special_tokens=True)

    return Encoder(encode)


async def _tokenized(pool: Pool, target: Target, text: str) -> dict[str, Any]:
    """Asks ``/tokenize``; the answer is empty where there is no such route."""
    status, answer = await pool.ask("POST", "/tokenize", {"model": target.model, "prompt": text})
    return dict(answer) if status == 200 and isinstance(answer, dict) else {}


async def make_encoder(pool: Pool, target: Target, folder: Path | None) -> Encoder:
    """Returns an encoder with the server's tokens: a folder's tokenizer, or the server. Raises ConfigError."""
    if folder is not None:
        return _encoder_of(folder)

    async def encode(text: str) -> Int32Array:
        tokens = (await _tokenized(pool, target, text)).get("tokens")
        if not isinstance(tokens, list):
            raise ConfigError(
                "the server does not tell the tokens of a text. Give --tokenizer, the model's folder.",
                param="tokenizer",
            )
        return np.array(tokens, dtype=np.int32)

    await encode("a")
    return Encoder(encode)


async def make_counter(pool: Pool, client: Client, target: Target, folder: Path | None, text: str) -> Counter:
    """Returns the most exact counter: a folder's tokenizer, the server, or the usage of a text like those to count."""
    if folder is not None:
        encoder = _encoder_of(folder)

        async def count(text: str) -> int:
            return int((await encoder.encode(text)).size)

        return Counter(count)
    if isinstance((await _tokenized(pool, target, "a")).get("count"), int):

        async def ask(text: str) -> int:
            answer = await _tokenized(pool, target, text)
            if "count" not in answer:
                raise UnavailableError("/tokenize does not answer any more. Give --tokenizer, the model's folder.")
            return int(answer["count"])

        return Counter(ask)
    probe, sample = text[:PROBE_CHARS], Sample()
    await client.send(probe, 1, sample)
    if sample.num_prompt < 1:
        raise UnavailableError(
            f"the server does not tell how long texts are in tokens ({sample.error or 'no usage'}). "
            "Give --tokenizer, the model's folder."
        )
    tokens_per_char = ESTIMATE_MARGIN * sample.num_prompt / len(probe)

    async def estimate(text: str) -> int:
        return int(len(text) * tokens_per_char) + 1

    return Counter(estimate, is_exact=False)
