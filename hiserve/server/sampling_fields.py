"""Reads sampling parameters from a request, the model's own defaults in the place of what it leaves out."""

from __future__ import annotations

from hiserve.core.request import SamplingParams, SpecParams
from hiserve.errors import RequestError
from hiserve.server.body_fields import Fields


def parse_sampling(
    fields: Fields,
    defaults: SamplingParams,
    *,
    vocab_size: int,
    spec_steps: int,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Reads how to sample and when to stop.

    Args:
        fields: Where the fields of ``known_fields.SAMPLING`` are.
        defaults: Values of temperature, filters and repetition penalty where the fields are silent.
        vocab_size: Token ids must be below it.
        spec_steps: Drafts that the engine verifies at once, at most; 0 without speculation.
        max_tokens: As the endpoint reads it; its name differs.
        logprobs: The same.
        prompt_logprobs: The same.

    Raises:
        RequestError: A field is malformed or out of range.
    """
    sampling = SamplingParams(
        temperature=fields.number("temperature", defaults.temperature),
        top_k=fields.count("top_k", defaults.top_k),
        top_p=fields.number("top_p", defaults.top_p),
        min_p=fields.number("min_p", defaults.min_p),
        repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        logit_bias=fields.numbers_by_token("logit_bias"),
        seed=fields.integer("seed"),
        n=fields.count("n", 1),
        max_tokens=max_tokens,
        min_tokens=fields.count("min_tokens", 0),
        stop=fields.texts("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output") or fields.flag("no_stop_trim"),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        spec=_spec(fields) if fields.has("spec") else None,
    )
    sampling.check_vocabulary(vocab_size)
    sampling.check_spec(spec_steps)
    return sampling


def _spec(fields: Fields) -> SpecParams:
    spec = fields.nested("spec")
    for name in spec.values:
        if name not in SpecParams.__struct_fields__:
            raise RequestError(f"spec.{name[:100]} is not known; spec takes enabled and num_steps.", param="spec")
    return SpecParams(
        enabled=spec.flag("enabled") if spec.has("enabled") else None, num_steps=spec.integer("num_steps")
    )
