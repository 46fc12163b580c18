"""One request from its prompt to its last token: deltas become text, counts and one log line."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.errors import HiserveError, InvariantError
from hiserve.server.gate import Delta, Engine
from hiserve.server.metrics import Meter
from hiserve.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """What one delta adds for the client.

    Attributes:
        text: Characters that are complete now; may be empty.
        tokens: The delta's token ids.
        finish: RUNNING until the last piece.
    """

    text: str
    tokens: list[int]
    finish: FinishReason


class Generation:
    """A request in the engine.

    Args:
        name: The response's id, for the log.
        prompt: int32 ``[n]``.
        sampling: How to sample and when to stop.
        detokenizer: For this stream alone.
        meter: For this request alone.
        remember: Called with text and token ids of a reply that came to its own end, before its last piece
            is handed out: the client's next request may follow at once.

    Attributes:
        num_cached: Prompt tokens served from the cache.
        tokens: All token ids so far.
        finish: RUNNING until the end.
    """

    def __init__(
        self,
        name: str,
        prompt: Int32Array,
        sampling: SamplingParams,
        *,
        detokenizer: Detokenizer,
        meter: Meter,
        remember: Callable[[str, list[int]], None] | None = None,
    ) -> None:
        self._name = name
        self.prompt = prompt
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._meter = meter
        self._remember = remember
        self._texts: list[str] = []
        self.num_cached = 0
        self.tokens: list[int] = []
        self.finish = FinishReason.RUNNING

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    async def run(self, engine: Engine, *, namespace: bytes = b"") -> AsyncGenerator[Piece, None]:
        """Yields pieces until the request ends. Closing the generator aborts the request.

        Raises:
            HiserveError: The engine refused or failed the request.
        """
        reason, detail = "abort", ""
        try:
            async with aclosing(engine.generate(self.prompt, self._sampling, namespace=namespace)) as deltas:
                async for delta in deltas:
                    piece = self._take(delta)
                    if piece.finish:
                        self._end(piece.finish.name.lower())
                        if self._remember and piece.finish is not FinishReason.ABORT:
                            self._remember(self.text, self.tokens)
                    yield piece
            if not self.finish:
                raise InvariantError(f"{self._name}: the engine's stream ended after {len(self.tokens)} tokens")
        except (HiserveError, InvariantError) as error:
            reason, detail = "error", f" ({error})"
            raise
        finally:
            self._end(reason, detail)

    def _take(self, delta: Delta) -> Piece:
        if delta.cached >= 0:
            self.num_cached = delta.cached
            self._meter.admitted(delta.cached)
        self._meter.tokens(len(delta.tokens))
        self.tokens += delta.tokens
        self.finish = delta.finish
        text = self._detokenizer.push(delta.tokens)
        if delta.finish:
            text += self._detokenizer.flush()
        self._texts.append(text)
        return Piece(text, delta.tokens, delta.finish)

    def _end(self, reason: str, detail: str = "") -> None:
        """Counts and logs the end once; later calls are for requests that have ended already."""
        if self._meter.e2e_s is not None:
            return
        self._meter.ended(reason)
        logger.info(
            "%s %s%s: %d prompt tokens, %d cached, %d generated, first token after %s, %.3f s in all",
            self._name,
            reason,
            detail,
            len(self.prompt),
            self.num_cached,
            len(self.tokens),
            "-" if self._meter.ttft_s is None else f"{self._meter.ttft_s:.3f} s",
            self._meter.e2e_s,
        )
