"""Reads the rotary scaling of a checkpoint from its config.json."""

from __future__ import annotations

import math

import msgspec

from hiserve.config.serving import MAX_INT32
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields, RopeFields

# Kinds of scaling, and the fields each must have.
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary scaling. Keys are stored rotated, so every rule is static.

    ``dynamic`` scaling changes nothing up to ``max_position_embeddings``, which is the longest
    context it is served with: here it is ``default``. ``longrope`` has two lists of divisors and
    selects one by the longest request that is configured, not by the length of each: with a
    context beyond ``original_context``, transformers gives other logits for shorter prompts.
    """

    theta: float  # base of the frequencies
    kind: str = "default"  # ``default``, ``linear``, ``llama3``, ``yarn`` or ``longrope``
    factor: float = 1.0  # ratio of the stretched to the original context
    original_context: int = 0  # tokens the model was trained with before it was stretched
    attention_factor: float = 1.0  # factor of cosines and sines
    low_freq_factor: float = 1.0  # llama3: wavelengths above ``original_context`` over this are divided by ``factor``
    high_freq_factor: float = 1.0  # llama3: wavelengths below ``original_context`` over this are unchanged
    beta_fast: float = 32.0  # yarn: frequencies with more turns than this within the original context are unchanged
    beta_slow: float = 1.0  # yarn: frequencies with fewer turns are divided by ``factor``
    truncate: bool = True  # yarn: both bounds are rounded outwards to whole dimensions
    # longrope: divisor of each frequency within the original context, ``head_dim / 2`` of them.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()  # longrope: the same for longer contexts

    def fixed(self, max_len: int) -> RopeConfig:
        """Returns the rule for requests of up to ``max_len`` tokens, with one list of divisors, ``short_factor``."""
        is_long = self.kind == "longrope" and max_len > self.original_context
        return msgspec.structs.replace(
            self, short_factor=self.long_factor if is_long else self.short_factor, long_factor=()
        )


def read_rope(fields: ConfigFields, head_dim: int) -> RopeConfig:
    """Returns the scaling of ``rope_parameters`` or of the older ``rope_scaling``; that of full layers if types differ.

    Raises:
        ModelError: An unknown kind, or one whose numbers are missing or invalid.
    """
    given = fields.rope_parameters or RopeFields()
    if _has_types(given):
        given = given.full_attention or RopeFields()
    return _read(fields, given, given.rope_theta or fields.rope_theta or 10_000.0, head_dim)


def read_local_rope(fields: ConfigFields, head_dim: int) -> RopeConfig | None:
    """Returns the scaling of sliding layers, or None if they have that of all.

    Raises:
        ModelError: As ``read_rope``.
    """
    given = fields.rope_parameters or RopeFields()
    if fields.rope_local_base_freq is None:
        if _has_types(given):
            raise ModelError("rope_parameters of several layer types are not supported for this model.", param="model")
        return None
    local = given.sliding_attention or RopeFields()
    return _read(fields, local, local.rope_theta or fields.rope_local_base_freq, head_dim)


def _has_types(given: RopeFields) -> bool:
    return given.full_attention is not None or given.sliding_attention is not None


def _read(fields: ConfigFields, given: RopeFields, theta: float, head_dim: int) -> RopeConfig:
    kind = given.rope_type or given.type or "default"
    _refuse(fields, given, kind, head_dim, theta)
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    original = original_context(fields, given)
    factor = given.factor or fields.max_position_embeddings / original
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=original,
        attention_factor=_attention_factor(given, kind, factor, original),
        low_freq_factor=given.low_freq_factor or 1.0,
        high_freq_factor=given.high_freq_factor or 1.0,
        beta_fast=given.beta_fast or 32.0,
        beta_slow=given.beta_slow or 1.0,
        truncate=given.truncate is not False,
        short_factor=given.short_factor or (),
        long_factor=given.long_factor or (),
    )


def original_context(fields: ConfigFields, given: RopeFields) -> int:
    """Returns the tokens the model was trained with before its context was stretched."""
    named = fields.original_max_position_embeddings or given.original_max_position_embeddings
    return named or fields.max_position_embeddings


def stretched_context(fields: ConfigFields, rope: RopeConfig) -> int:
    """Returns the longest context of a model, in tokens.

    Files with yarn often keep the original ``max_position_embeddings`` (those of Qwen2.5 do), so the factor is applied
    too. For every other kind ``max_position_embeddings`` is used.
    """
    stretched = int(min(rope.original_context * rope.factor, MAX_INT32)) if rope.kind == "yarn" else 0
    return max(fields.max_position_embeddings, stretched)


def _attention_factor(given: RopeFields, kind: str, factor: float, original: int) -> float:
    """Peng et al., YaRN, 2023 (its ``mscale`` as DeepSeek-V2 extended it); Ding et al., LongRoPE, 2024."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given.attention_factor is not None:
        return given.attention_factor
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if given.mscale and given.mscale_all_dim:
        return _mscale(factor, given.mscale) / _mscale(factor, given.mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _refuse(fields: ConfigFields, given: RopeFields, kind: str, head_dim: int, theta: float) -> None:
    """Raises ModelError for values that cannot be computed."""
    if kind not in _NEEDS:
        raise ModelError(f"RoPE scaling {kind!r} is not supported yet. Supported: {', '.join(_NEEDS)}.", param="model")
    missing = [name for name in _NEEDS[kind] if getattr(given, name) is None]
    if missing:
        raise ModelError(f"config.json makes no sense: RoPE scaling {kind} lacks {', '.join(missing)}.", param="model")
    original, lists = original_context(fields, given), (given.short_factor, given.long_factor)
    nonsense = {
        f"low_freq_factor {given.low_freq_factor} is not below high_freq_factor {given.high_freq_factor}": (
            kind == "llama3" and (given.low_freq_factor or 0) >= (given.high_freq_factor or 0)
        ),
        f"rope_theta is {theta}, but yarn needs more than 1": kind == "yarn" and theta <= 1,
        f"original_max_position_embeddings is {original}, but longrope needs 2 or more": (
            kind == "longrope" and original < 2
        ),
        f"short_factor and long_factor must have {head_dim // 2} entries, half of head_dim {head_dim}": (
            kind == "longrope" and any(len(each or ()) != head_dim // 2 for each in lists)
        ),
    }
    for fact, is_so in nonsense.items():
        if is_so:
            raise ModelError(f"config.json makes no sense: {fact}.", param="model")
