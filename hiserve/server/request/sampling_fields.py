"""Request fields of prompts and sampling that several protocols share; the model's defaults replace omitted ones."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from hiserve.config.serving import MAX_INT32
from hiserve.core.request import LENGTHS, MAX_STOP_CHARS, NOT_ZERO, RANGES, SamplingParams, SpecParams
from hiserve.errors import ContextLengthError, RequestError
from hiserve.server.reply.format import ServedModel
from hiserve.text.body.json import check_text

MAX_CHOICES = 4096  # of all prompts of a request
MAX_NAME_CHARS = 1024
TOKEN_ID = "a token id"


def range_of(name: str) -> Meta:
    """Returns the range of a field of ``SamplingParams``."""
    least, most = RANGES[name]
    return Meta(gt=least, le=most, description=NOT_ZERO[name]) if name in NOT_ZERO else Meta(ge=least, le=most)


NonEmpty = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Priority = Annotated[int, Meta(ge=-MAX_INT32, le=MAX_INT32)]
# The model has the range: ``SamplingParams.check_vocabulary`` and ``openapi.py`` apply it.
TokenId = Annotated[int, Meta(title=TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
# Not a pattern of the names: msgspec 0.22 frees memory twice for some types with a pattern.
TOKEN_KEY = re.compile("^[0-9]{1,10}$")
Biases = Annotated[
    dict[str, Bias],
    Meta(
        max_length=LENGTHS["logit_bias"],
        description="names are token ids",
        extra_json_schema={"propertyNames": {"pattern": TOKEN_KEY.pattern}},
    ),
]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all endpoints share; null is the same as an omitted field."""

    temperature: Annotated[float, range_of("temperature")] | None = None
    top_k: Annotated[int, range_of("top_k")] | None = None
    top_p: Annotated[float, range_of("top_p")] | None = None
    min_p: Annotated[float, range_of("min_p")] | None = None
    repetition_penalty: Annotated[float, range_of("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, range_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, range_of("frequency_penalty")] | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, range_of("seed")] | None = None
    n: Annotated[int, range_of("n")] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=LENGTHS["stop"])] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=LENGTHS["stop_token_ids"])] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    spec: SpecParams | None = None

    def params(
        self,
        model: ServedModel,
        *,
        max_tokens: int | None,
        min_tokens: int | None,
        seed: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Returns the sampling parameters.

        Args:
            model: Has the values of omitted fields.
            max_tokens: Like the other arguments, a field with another name in each endpoint.
            min_tokens: None is 0.
            seed: None draws one.
            logprobs: As in ``SamplingParams``.
            prompt_logprobs: As in ``SamplingParams``.

        Raises:
            RequestError: Fields exclude each other, or the model or engine has no such token or speculation.
        """
        given: dict[str, Any] = {
            name: value for name in SamplingFields.__struct_fields__ if (value := getattr(self, name)) is not None
        }
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in stop:
            check_text(text, "stop")
        if not all(TOKEN_KEY.fullmatch(token) for token in self.logit_bias or ()):
            raise RequestError("logit_bias must be an object whose names are token ids.", param="logit_bias")
        keeps_stop = given.pop("no_stop_trim", False) or self.include_stop_str_in_output or False
        sampling = msgspec.structs.replace(
            model.defaults,
            **given
            | {
                "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()} or None,
                "stop": stop,
                "stop_token_ids": tuple(self.stop_token_ids or ()),
                "include_stop_str_in_output": keeps_stop,
                "seed": seed,
                "max_tokens": max_tokens,
                "min_tokens": min_tokens or 0,
                "logprobs": logprobs,
                "prompt_logprobs": prompt_logprobs,
            },
        )
        sampling.check_vocabulary(model.vocab_size)
        sampling.check_spec(model.spec_steps)
        return sampling


class Limits(NamedTuple):
    """The requested length, and the names of its fields.

    Attributes:
        max_tokens: Tokens to generate at most; None if omitted. With 0 one is generated, and not shown.
        default: Tokens if ``max_tokens`` is None; None: up to the context limit.
        max_field: ``param`` of errors about ``max_tokens``.
        min_field: The same for ``min_tokens``.
        prompt_field: The same for the prompt.
        is_cut: A length beyond the context is cut to it, not refused: agents request far more than they use.
    """

    max_tokens: int | None
    default: int | None
    max_field: str
    min_field: str
    prompt_field: str
    is_cut: bool = False


def fit_context(sampling: SamplingParams, limits: Limits, num_prompt: int, max_model_len: int) -> SamplingParams:
    """Checks that prompt and reply fit the context; returns the sampling parameters.

    Args:
        sampling: Of the request.
        limits: Of the request.
        num_prompt: Tokens of the prompt.
        max_model_len: Longest prompt plus output, in tokens.

    Raises:
        ContextLengthError: Prompt and reply do not fit; the message names the largest value that fits.
    """
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError.of(f"{num_prompt} tokens", max_model_len, limits.prompt_field)
    if limits.is_cut and limits.max_tokens is not None:
        return msgspec.structs.replace(sampling, max_tokens=min(max(1, limits.max_tokens), room))
    for field, wanted in ((limits.max_field, limits.max_tokens or 0), (limits.min_field, sampling.min_tokens)):
        if wanted > room:
            name = field.rpartition(".")[2]
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens and {name} is {wanted}; this model's maximum context length is "
                f"{max_model_len} tokens. Shorten the prompt or lower {name} to {room}.",
                param=field,
            )
    if limits.max_tokens is not None or limits.default is None:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=min(max(limits.default, sampling.min_tokens), room))
