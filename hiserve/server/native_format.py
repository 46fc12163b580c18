"""The JSON of ``/generate``: text, token ids and ``meta_info`` of one choice, all of it each time."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from hiserve.core.request import FinishReason
from hiserve.server.generation import Generation, OutputDelta
from hiserve.server.logprobs import Scored, Spell, scored_prompt, token_text, unpack
from hiserve.server.reply_format import cache_miss, spec_details

# Logprob, token id, text of the token or None.
Entry = tuple[float | None, int, str | None]


class NativeFormatter:
    """Words one choice as it grows.

    Args:
        generation: The choice.
        first_scored: Tokens of the prompt from this index on are shown with their logprobs; None shows none.
        spell: Spells the tokens beside logprobs; None leaves their texts out.
        name: Its ``id``.
        version: The model's fingerprint.
        arrived: ``time.monotonic()`` when the request came.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        first_scored: int | None,
        spell: Spell | None,
        name: str,
        version: str,
        arrived: float,
    ) -> None:
        self._generation = generation
        self._first_scored = first_scored
        self._spell = spell
        self._name = name
        self._version = version
        self._arrived = arrived
        self._text = ""
        self._tokens: list[int] = []
        self._entries: list[Entry] = []
        self._tops: list[list[Entry]] = []
        self._input: dict[str, msgspec.Raw] = {}
        self._last = OutputDelta(generation.choice, "", [], b"", FinishReason.RUNNING, None)

    @property
    def is_large(self) -> bool:
        """Whether it takes long to word the next reply: the first one with the scores of a long prompt."""
        return self._first_scored is not None and not self._input and self._generation.scorer.has_many_prompt_scores

    def take(self, output_delta: OutputDelta) -> None:
        """Adds a piece."""
        self._last = output_delta
        self._text += output_delta.text
        self._tokens += output_delta.tokens
        num_top = self._generation.sampling.logprobs
        if num_top is not None:
            scored = unpack(output_delta.tokens, output_delta.scores, num_top)
            self._entries += map(self._entry, scored)
            self._tops += map(self._top, scored)

    def reply(self) -> dict[str, Any]:
        """Returns everything so far."""
        generation, is_over = self._generation, self._last.finish is not FinishReason.RUNNING
        cached = generation.cached
        meta: dict[str, Any] = {
            "id": self._name,
            "finish_reason": self._finish_reason() if is_over else None,
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": len(self._tokens),
            "cached_tokens": cached.num_tokens,
            "cached_tokens_details": {"device": cached.device, "host": cached.host, "storage": cached.store},
            "cache_miss": cache_miss(cached),
            "weight_version": self._version,
            **spec_details(generation.drafts),
        }
        if is_over:
            meta["e2e_latency"] = time.monotonic() - self._arrived
        if generation.queue_s >= 0:
            meta["queue_time"] = generation.queue_s
        if generation.sampling.logprobs is not None:
            meta |= self._logprobs(generation.sampling.logprobs)
        return {"text": self._text, "output_ids": self._tokens, "meta_info": meta}

    def _finish_reason(self) -> dict[str, Any]:
        output_delta = self._last
        if output_delta.finish is FinishReason.LENGTH:
            return {"type": "length", "length": len(self._tokens)}
        if output_delta.finish is FinishReason.ABORT:
            return {"type": "abort", "message": "the request was aborted."}
        ended_by = self._tokens[-1] if output_delta.stop is None and self._tokens else output_delta.stop
        return {"type": "stop", "matched": ended_by}

    def _logprobs(self, num_top: int) -> dict[str, Any]:
        shown: dict[str, Any] = {"output_token_logprobs": self._entries}
        if num_top:
            shown["output_top_logprobs"] = self._tops
        if self._first_scored is not None:
            self._input = self._input or self._input_logprobs(self._first_scored, has_top=num_top > 0)
        return shown | self._input

    def _input_logprobs(self, first_scored: int, *, has_top: bool) -> dict[str, msgspec.Raw]:
        """Returns what is known of the prompt, encoded: it stays as it is, and each event of a stream repeats it."""
        # Nothing is known of the first token that is shown: it is what the others are counted from.
        tokens, scored = scored_prompt(self._generation)
        first, known = tokens[first_scored:][:1], scored[first_scored:]
        unknown: list[Entry] = [(None, token, self._text_of(token)) for token in first]
        shown: dict[str, list[Any]] = {"input_token_logprobs": unknown + [self._entry(entry) for entry in known]}
        if has_top:
            shown["input_top_logprobs"] = [None] * len(first) + [self._top(entry) for entry in known]
        return {name: msgspec.Raw(msgspec.json.encode(entries)) for name, entries in shown.items()}

    def _entry(self, scored: Scored) -> Entry:
        return scored.logprob, scored.token, self._text_of(scored.token)

    def _top(self, scored: Scored) -> list[Entry]:
        return [(logprob, token, self._text_of(token)) for token, logprob in scored.top]

    def _text_of(self, token: int) -> str | None:
        return None if self._spell is None else token_text(self._spell(token))
