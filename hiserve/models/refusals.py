"""What config.json may say of activations, and what is refused of any architecture; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hiserve.config.options import DTYPE_BYTES
from hiserve.core.activation import GELU_TANH, SILU, Activation
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields
from hiserve.models.family import FAMILIES, Family

_ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


def read_architecture(given: Any) -> str:
    """Returns the one architecture a checkpoint names.

    Raises:
        ModelError: It is not supported, or there is none.
    """
    name = given[0] if isinstance(given, list) and given else given or "(none given)"
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"architecture {name} is not supported. Supported: {', '.join(sorted(FAMILIES))}.", param="model"
        )
    return name


def _activation(fields: ConfigFields) -> str:
    """Returns the activation of the MLP by its name in transformers."""
    return fields.hidden_activation or fields.hidden_act or "silu"


def read_activation(fields: ConfigFields, family: Family) -> Activation:
    """Returns the activation of the MLP.

    Raises:
        ModelError: It lacks a constant.
    """
    return _ACTIVATIONS[_activation(fields)]._replace(**_limits(fields, family))


def _limits(fields: ConfigFields, family: Family) -> dict[str, Any]:
    """Returns the constants of an activation that has a limit."""
    if "swiglu_limit" not in family.reads:
        return {}
    if family.is_compressed:
        return {"limit": fields.swiglu_limit}
    for name in ("swiglu_alpha", "swiglu_limit"):
        if getattr(fields, name) is None:
            raise ModelError(
                f"config.json makes no sense: {name} is null, but the experts need it. Give a number, or leave it out.",
                param="model",
            )
    return {"slope": fields.swiglu_alpha, "shift": 1.0, "limit": fields.swiglu_limit}


def refuse_nonsense(fields: ConfigFields, folder: Path, kv_heads: int, head_dim: int, dtype: str) -> None:
    """Checks that fields do not contradict each other.

    Raises:
        ModelError: They do.
    """
    heads, experts = fields.num_attention_heads, fields.num_experts or 0
    nonsense = {
        f"{heads} attention heads are not a multiple of {kv_heads} key-value heads": heads % kv_heads,
        f"hidden_size {fields.hidden_size} is not a multiple of its {heads} attention heads, and head_dim is not given": (
            fields.head_dim is None and fields.kv_lora_rank is None and fields.hidden_size % heads
        ),
        f"head_dim {head_dim} is odd, but RoPE turns pairs": head_dim % 2,
        f"dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}": dtype not in DTYPE_BYTES,
        f"{fields.num_experts_per_tok} experts per token are more than there are ({experts})": (
            experts and (fields.num_experts_per_tok or 0) > experts
        ),
    }
    for fact, is_so in nonsense.items():
        if is_so:
            raise ModelError(f"config.json in {str(folder)!r} makes no sense: {fact}.", param="model")


def refuse_unsupported(fields: ConfigFields, architecture: str, *, has_partial_rotation: bool) -> None:
    """Checks that no field asks for a computation that is not there.

    Raises:
        ModelError: One does.
    """
    in_rope = fields.rope_parameters.partial_rotary_factor if fields.rope_parameters else None
    refused = {
        f"{'hidden_activation' if fields.hidden_activation else 'hidden_act'} {_activation(fields)}": (
            _activation(fields) not in _ACTIVATIONS
        ),
        "attn_logit_softcapping": fields.attn_logit_softcapping,
        "use_bidirectional_attention": fields.use_bidirectional_attention,
        "partial_rotary_factor": not has_partial_rotation and {fields.partial_rotary_factor, in_rope} - {None, 1.0},
    }
    named = [name for name, is_set in refused.items() if is_set]
    if named:
        raise ModelError(f"{architecture} with {', '.join(named)} is not supported yet.", param="model")
