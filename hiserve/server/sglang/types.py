"""Requests and replies of ``/generate`` in SGLang's format; a request becomes one or more single prompts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from hiserve.config.serving import MAX_INT32
from hiserve.core.plan import Int32Array
from hiserve.core.request import MAX_LOGPROBS, SamplingParams
from hiserve.errors import RequestError
from hiserve.server.reply.format import CacheMiss, ServedModel, SpecTokensDetails
from hiserve.server.request.grammar_fields import Constraint, GrammarFields, JsonSchema, constraints_of
from hiserve.server.request.resumption import ResumeIds
from hiserve.server.request.sampling_fields import (
    MAX_CHOICES,
    Limits,
    Name,
    NonEmpty,
    Priority,
    TokenIds,
    range_of,
)
from hiserve.text.body.json import check_text, union
from hiserve.text.body.parser import MAX_PROMPTS, check_num_prompts, parse_prompt

DEFAULT_NEW_TOKENS = 128
MOST_PROMPTS = Meta(min_length=1, max_length=MAX_PROMPTS)
Texts = Annotated[Any, union("a string, or a list of strings", NonEmpty, Annotated[list[NonEmpty], MOST_PROMPTS])]
InputIds = Annotated[
    Any, union("a list of token ids, or a list of such lists", TokenIds, Annotated[list[TokenIds], MOST_PROMPTS])
]
NewTokens = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Start = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class NativeSampling(GrammarFields, frozen=True, kw_only=True):
    """``sampling_params``. ``max_new_tokens`` 0 generates nothing."""

    max_new_tokens: NewTokens | None = None
    min_new_tokens: NewTokens | None = None
    sampling_seed: Annotated[int, range_of("seed")] | None = None
    json_schema: JsonSchema = None

    def constraints(self) -> list[Constraint]:
        """Returns the grammars asked for."""
        return super().constraints() + constraints_of("json", self.json_schema, "json_schema")


class NativePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its options.

    Attributes:
        prompt: A non-empty text, or int32 ``[n]`` with n > 0.
        sampling: As the engine gets it, with ``max_tokens`` at least 1.
        limits: Its length.
        first_scored: Tokens of the prompt from this index on are shown with their logprobs; None shows none.
        rid: Name of the request, or None.
        constraint: The grammar asked for, or None.
    """

    prompt: str | Int32Array
    sampling: SamplingParams
    limits: Limits
    first_scored: int | None
    rid: str | None
    constraint: Constraint | None = None

    def num_prompt_scores(self, num_prompt: int) -> int:
        """Returns how many scores of its prompt's tokens are shown, all choices together."""
        if self.first_scored is None:
            return 0
        return self.sampling.n * max(0, num_prompt - self.first_scored) * (1 + (self.sampling.prompt_logprobs or 0))


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to ``/generate``: ``text`` or ``input_ids``, and fields that may be lists with an entry for each prompt."""

    text: Texts | None = None
    input_ids: InputIds | None = None
    sampling_params: NativeSampling | list[NativeSampling | None] | None = None
    rid: Name | list[Name | None] | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: Start | list[Start | None] | None = None
    top_logprobs_num: NumTop | list[NumTop | None] | None = None
    return_text_in_logprobs: bool | None = None
    resume_token_ids: ResumeIds | None = None
    stream: bool | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        """Refuses values that exclude each other.

        Raises:
            RequestError: There are some.
        """
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids.", param="text")

    @property
    def is_batch(self) -> bool:
        """Whether it has a list of prompts, so that the reply is a list."""
        given, kinds = (self.input_ids, list | np.ndarray) if self.text is None else (self.text, str)
        return isinstance(given, list) and bool(given) and isinstance(given[0], kinds)

    def prompts(self, model: ServedModel) -> list[NativePrompt]:
        """Returns its prompts, each with its own fields.

        Raises:
            RequestError: A prompt is malformed, or there are too many; a list does not fit the prompts.
        """
        name = "input_ids" if self.text is None else "text"
        given: Any = getattr(self, name)
        values: list[Any] = given if self.is_batch else [given]
        check_num_prompts(len(values), name)
        if isinstance(values[0], str) != (name == "text") or not isinstance(values[0], str | list | np.ndarray):
            wanted = (
                "a string or a list of strings" if name == "text" else "a list of token ids, or a list of such lists"
            )
            raise RequestError(f"{name} must be {wanted}.", param=name)
        prompts = [
            self._prompt(parse_prompt(value, vocab_size=model.vocab_size, param=name), i, len(values), model)
            for i, value in enumerate(values)
        ]
        num_choices = sum(prompt.sampling.n for prompt in prompts)
        if num_choices > MAX_CHOICES:
            raise RequestError(
                f"the request asks for {num_choices} choices; the most is {MAX_CHOICES}.", param="sampling_params.n"
            )
        return prompts

    def _prompt(self, prompt: str | Int32Array, i: int, num_prompts: int, model: ServedModel) -> NativePrompt:
        given: NativeSampling = self._of("sampling_params", i, num_prompts) or NativeSampling()
        num_top = self._of("top_logprobs_num", i, num_prompts) or 0
        start = self._of("logprob_start_len", i, num_prompts)
        has_logprobs = bool(self._of("return_logprob", i, num_prompts))
        rid = self._of("rid", i, num_prompts)
        check_text(rid or "", "rid")
        first_scored = start if has_logprobs and start is not None and start >= 0 else None
        most, least = given.max_new_tokens, given.min_new_tokens or 0
        if most is not None and least > max(1, most):
            raise RequestError(
                f"sampling_params.min_new_tokens is {least}, more than max_new_tokens ({most}).",
                param="sampling_params.min_new_tokens",
            )
        try:
            sampling = given.params(
                model,
                max_tokens=max(1, least, DEFAULT_NEW_TOKENS) if most is None else max(1, most),
                min_tokens=least,
                seed=given.seed if given.sampling_seed is None else given.sampling_seed,
                logprobs=num_top if has_logprobs else None,
                prompt_logprobs=None if first_scored is None else num_top,
            )
            constraint = given.constraint
        except RequestError as error:
            raise RequestError(f"sampling_params.{error.message}", param=f"sampling_params.{error.param}") from None
        return NativePrompt(
            prompt=prompt,
            sampling=sampling,
            limits=Limits(
                most,
                DEFAULT_NEW_TOKENS,
                "sampling_params.max_new_tokens",
                "sampling_params.min_new_tokens",
                "input_ids" if self.text is None else "text",
            ),
            first_scored=first_scored,
            rid=rid or None,
            constraint=constraint and constraint._replace(param=f"sampling_params.{constraint.param}"),
        )

    def _of(self, name: str, i: int, num_prompts: int) -> Any:
        """Returns a prompt's entry of a list, or the one value that is for all."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return value
        if not self.is_batch:
            raise RequestError(f"{name} is a list, and there is one prompt. Give one value.", param=name)
        if len(value) != num_prompts:
            raise RequestError(f"{name} has {len(value)} entries for {num_prompts} prompts.", param=name)
        return value[i]


class StorageTokensDetails(msgspec.Struct):
    """Cached tokens by the tier that had them; ``storage`` is the store."""

    device: int
    host: int
    storage: int


# Logprob, token id, text of the token or None.
Entry = tuple[float | None, int, str | None]
Entries = list[Entry]


class FinishInfo(msgspec.Struct):
    """The end of a choice: ``length`` with its tokens, ``abort`` with a message, ``stop`` with the text or token."""

    type: str
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET
    matched: str | int | UnsetType | None = UNSET


class MetaInfo(msgspec.Struct):
    """The facts of a reply of ``/generate``; scores of the prompt are encoded already."""

    id: str
    finish_reason: FinishInfo | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: StorageTokensDetails
    cache_miss: CacheMiss | None
    weight_version: str
    spec_tokens_details: SpecTokensDetails | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    queue_time: float | UnsetType = UNSET
    output_token_logprobs: Entries | UnsetType = UNSET
    output_top_logprobs: list[Entries] | UnsetType = UNSET
    input_token_logprobs: msgspec.Raw | UnsetType = UNSET
    input_top_logprobs: msgspec.Raw | UnsetType = UNSET


class Generated(msgspec.Struct):
    """Reply of ``/generate`` to one prompt; an event of its stream has the same form, and the index of its choice."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
