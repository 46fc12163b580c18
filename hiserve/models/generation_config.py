"""Reads a checkpoint's end tokens and sampling defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hiserve.config.serving import MAX_INT32
from hiserve.core.request import SamplingParams
from hiserve.models.config_fields import TokenId, convert, read_json


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters for requests that omit them; None where the model gives none."""

    temperature: float | None = None  # 0 is greedy; range 0 to 100
    top_p: float | None = None  # range (0, 1]
    top_k: int | None = None  # 0 or -1 keeps all tokens
    min_p: float | None = None  # range 0 to 1
    repetition_penalty: float | None = None  # 1 is none; range (0, 100]

    def params(self) -> SamplingParams:
        """Returns the sampling of a request without parameters."""
        given = msgspec.structs.asdict(self)
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class _Fields(msgspec.Struct):
    """The fields of ``generation_config.json`` that are read; the ranges are those of a request."""

    eos_token_id: TokenId | list[TokenId] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``generation_config.json``."""

    eos_token_ids: tuple[int, ...] | None = None  # tokens that end a reply; None when the file omits them
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # for requests that omit parameters


def read_generation(folder: Path) -> GenerationConfig:
    """Reads ``generation_config.json``; without the file all values are unset.

    ``do_sample: false`` means a temperature of 0 when the file names none of temperature, top_p,
    top_k and min_p. Files that name one of them are often saved with ``do_sample: false`` by
    accident; there it is ignored.

    Raises:
        ModelError: The file is not JSON, or a value is of the wrong type or out of range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    fields = convert(read_json(path), _Fields, path)
    is_greedy = fields.do_sample is False and {fields.temperature, fields.top_p, fields.top_k, fields.min_p} == {None}
    return GenerationConfig(
        eos_token_ids=as_ids(fields.eos_token_id),
        sampling_defaults=SamplingDefaults(
            temperature=0.0 if is_greedy else fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
        ),
    )


def as_ids(given: int | list[int] | None) -> tuple[int, ...] | None:
    """Returns the ids of a field that holds one, several or none."""
    return None if given is None else tuple(given) if isinstance(given, list) else (given,)
