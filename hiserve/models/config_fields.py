"""Reads the JSON files of a checkpoint with types and ranges, and the sliding windows that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hiserve.config.serving import MAX_INT32
from hiserve.errors import ModelError

Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Size = Annotated[int, Meta(ge=1, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
# Far beyond any model; within these, no product of a forward leaves the range of its type. Bounds also refuse NaN and
# Infinity, which Python's JSON reader accepts.
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
Turns = Annotated[float, Meta(ge=0, le=1e6)]
Epsilon = Annotated[float, Meta(ge=1e-30, le=1)]
Base = Annotated[float, Meta(ge=1, le=1e12)]

# Spelling of older files -> spelling of transformers 5.
_OLD_SPELLINGS = {
    "torch_dtype": "dtype",
    "rope_scaling": "rope_parameters",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
    "mtp_num_hidden_layers": "num_nextn_predict_layers",
}

# Far above any model; beyond these, the shapes, names and tables of a model would themselves fill memory.
MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**16,
    "intermediate_size": 2**22,
    "num_experts": 2**14,
    "num_experts_per_tok": 2**14,
    "moe_intermediate_size": 2**22,
    "num_nextn_predict_layers": 2**6,
    "kv_lora_rank": 2**16,
    "q_lora_rank": 2**16,
    "qk_nope_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "v_head_dim": 2**16,
    "n_shared_experts": 2**10,
    "n_group": 2**14,
    "first_k_dense_replace": 2**12,
    "linear_num_key_heads": 2**14,
    "linear_num_value_heads": 2**14,
    "linear_key_head_dim": 2**16,
    "linear_value_head_dim": 2**16,
    "linear_conv_kernel_dim": 2**10,
    "shared_expert_intermediate_size": 2**22,
}
MAX_EXPERT_MATRICES = 2**20  # of all layers together: each has a name, and a place in a checkpoint

_T = TypeVar("_T", bound=msgspec.Struct)


class RopeFields(msgspec.Struct):
    """``rope_parameters``; each kind of scaling reads some of them."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base | None = None
    partial_rotary_factor: float | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: Turns | None = None
    beta_slow: Turns | None = None
    mscale: Turns | None = None
    mscale_all_dim: Turns | None = None
    truncate: bool | None = None
    short_factor: tuple[Factor, ...] | None = None
    long_factor: tuple[Factor, ...] | None = None
    # Of the layers of each type; the fields above are then not given.
    full_attention: RopeFields | None = None
    sliding_attention: RopeFields | None = None


class ConfigFields(msgspec.Struct):
    """The fields of ``config.json`` that are read, in the spelling of transformers 5."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    rms_norm_eps: Epsilon
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rope_parameters: RopeFields | None = None
    rope_theta: Base | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: float | None = None
    dtype: str | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    bos_token_id: TokenId | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Count | None = None
    layer_types: list[str] | None = None
    num_experts: Count | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Size | None = None
    num_nextn_predict_layers: Count | None = None
    mlp_only_layers: tuple[int, ...] | None = None
    mlp_layer_types: list[str] | None = None
    first_k_dense_replace: Count | None = None
    moe_layer_freq: Any = None
    n_shared_experts: Count | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    routed_scaling_factor: Factor | None = None
    scoring_func: str | None = None
    topk_method: str | None = None
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    rope_interleave: bool | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    rope_local_base_freq: Base | None = None
    query_pre_attn_scalar: Factor | None = None
    final_logit_softcapping: Factor | None = None
    attn_logit_softcapping: Factor | None = None
    use_bidirectional_attention: bool | str | None = None
    sliding_window_pattern: Size | None = None
    swiglu_alpha: Factor | None = None
    swiglu_limit: Factor | None = None
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Size | None = None
    full_attention_interval: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    quantization_config: Any = None
    expert_dtype: Any = None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: The file cannot be read or is not a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror}.", param="model") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path.name} in {str(path.parent)!r} is not valid JSON: {error}. Fetch it again.", param="model"
        ) from None
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} in {str(path.parent)!r} is not a JSON object.", param="model")
    return found


def convert(raw: dict[str, Any], kind: type[_T], path: Path) -> _T:
    """Returns the fields of a file; fields that ``kind`` does not name are not checked.

    Raises:
        ModelError: A field is missing, has the wrong type or is out of range.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path.name} in {str(path.parent)!r} makes no sense: {error}.", param="model") from None


def refuse_oversize(fields: ConfigFields, path: Path) -> None:
    """Checks every size against its limit, before anything of that size is allocated.

    Raises:
        ModelError: A size is larger.
    """
    sizes = {name: getattr(fields, name) or 0 for name in MOST}
    facts = {f"{name} is {size}, and the most is {MOST[name]}": size > MOST[name] for name, size in sizes.items()}
    experts = 3 * sizes["num_hidden_layers"] * sizes["num_experts"]
    facts[f"its experts have {experts} matrices, and the most is {MAX_EXPERT_MATRICES}"] = experts > MAX_EXPERT_MATRICES
    for fact, is_so in facts.items():
        if is_so:
            raise nonsense(path, fact)


def nonsense(path: Path, fact: str) -> ModelError:
    """Returns the error of a file whose fields are out of range, or contradict each other."""
    return ModelError(
        f"{path.name} in {str(path.parent)!r} makes no sense: {fact}. Correct it, or fetch the file again.",
        param="model",
    )


_INDEX = "index_topk"
# Parts of models that are not read, by a field that a model with such a part has, or its beginning: what they are.
_FOREIGN = {
    "dspark_": "drafts of DSpark; heads that draft one token after another are supported",
    "compress_ratios": "layers with compressed rows; layers that store a row for each token are supported",
    _INDEX: "attention to chosen tokens; attention to all tokens is supported",
}


def refuse_foreign(raw: dict[str, Any], architecture: str, *, has_index: bool) -> None:
    """Checks that a configuration of a model without compressed attention has no field of a part that would be left out.

    ``has_index`` says that the family reads the fields of an index.

    Raises:
        ModelError: It has one, and the model would compute something else.
    """
    for name, value in raw.items():
        for start, part in _FOREIGN.items():
            if value and name.startswith(start) and not (has_index and start == _INDEX):
                raise ModelError(f"{architecture} with {name} is not supported yet: {part}.", param="model")


def respell(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns ``config.json`` in the spelling of transformers 5.

    Raises:
        ModelError: The old and the new spelling of a field differ.
    """
    spelled = _text_fields(raw, path)
    for old, new in _OLD_SPELLINGS.items():
        if old in spelled and not spelled.get(new):
            spelled[new] = spelled[old]
        elif spelled.get(old) and spelled[old] != spelled[new]:
            raise ModelError(
                f"{path.name} in {str(path.parent)!r} makes no sense: {old} and {new} differ. Keep one of them.",
                param="model",
            )
    return spelled


def _text_fields(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the fields of a multimodal model's text model, those outside ``text_config`` first; or all of another's."""
    text = raw.get("text_config")
    if text is None:
        return dict(raw)
    if not isinstance(text, dict):
        raise ModelError(
            f"{path.name} in {str(path.parent)!r} makes no sense: text_config is not an object.", param="model"
        )
    return text | {name: value for name, value in raw.items() if value is not None}


_SLIDING = "sliding_attention"
_LAYER_TYPES = {"full_attention", "attention", _SLIDING}


def read_windows(fields: ConfigFields, context_length: int) -> tuple[int | None, ...]:
    """Returns the window of each layer: a token at position p sees positions above p - window. Empty is none anywhere.

    A window of at least ``context_length`` (most tokens of a request) has no effect, and counts as none. Layers slide
    by ``layer_types``, else from ``max_window_layers`` on, else all.

    Raises:
        ModelError: Types of layers that are not supported, or that contradict the other fields.
    """
    window, slides = _window(fields), which_slide(fields)
    if window is None or window >= context_length or not any(slides):
        return ()
    return tuple(window if each else None for each in slides)


def _window(fields: ConfigFields) -> int | None:
    return None if fields.use_sliding_window is False else fields.sliding_window


def which_slide(fields: ConfigFields) -> list[bool]:
    """Returns of each layer whether it is of the type that slides, if there is a window.

    Raises:
        ModelError: As ``read_windows``.
    """
    window, num_layers, types = _window(fields), fields.num_hidden_layers, fields.layer_types
    if types is None and fields.sliding_window_pattern is not None:
        return [(layer + 1) % fields.sliding_window_pattern > 0 for layer in range(num_layers)]
    if types is None:
        return [layer >= (fields.max_window_layers or 0) for layer in range(num_layers)]
    if unknown := sorted(set(types) - _LAYER_TYPES):
        raise ModelError(
            f"layer_types of config.json has {', '.join(unknown)}, which is not supported yet. Supported: "
            f"{', '.join(sorted(_LAYER_TYPES))}.",
            param="model",
        )
    nonsense = None
    if len(types) != num_layers:
        nonsense = f"layer_types names {len(types)} layers, and num_hidden_layers is {num_layers}"
    elif window is None and _SLIDING in types:
        nonsense = f"layer_types has {_SLIDING}, but there is no sliding_window, or use_sliding_window is false"
    if nonsense is not None:
        raise ModelError(f"config.json makes no sense: {nonsense}.", param="model")
    return [each == _SLIDING for each in types]
