"""The supported architectures, and how each reads its config.json."""

from __future__ import annotations

from typing import Any

import msgspec


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Settings implied by the name of an architecture."""

    has_qk_norm: bool = False  # RMSNorm on each query and key head
    has_qkv_bias: bool = False  # queries, keys and values have a bias, regardless of config.json
    has_latents: bool = False  # latent attention, and experts with a biased choice among groups
    # Fields of config.json that transformers does not read for it, in its spelling.
    ignored: frozenset[str] = frozenset()
    defaults: dict[str, Any] = {}  # values of fields that config.json omits

    def complete(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Returns config.json without ignored fields and with defaults."""
        return self.defaults | {name: value for name, value in raw.items() if name not in self.ignored}


_WINDOW = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_WINDOW_SWITCHES = _WINDOW - {"sliding_window"}
_EXPERTS = frozenset(
    {
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)
_BIAS = frozenset({"attention_bias", "mlp_bias"})
_EXPERT_SWITCHES = _EXPERTS - {"num_experts", "num_experts_per_tok"}
_QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN2 = Family(
    has_qkv_bias=True,
    ignored=_EXPERTS | _BIAS,
    defaults=_QWEN_WINDOW | {"max_window_layers": 28, "num_key_value_heads": 32},
)

_NOT_LATENT = frozenset({"decoder_sparse_step", "mlp_only_layers", "mlp_bias", "head_dim", "num_key_value_heads"})
_LATENT_EXPERTS: dict[str, Any] = {"n_shared_experts": 1, "norm_topk_prob": True}

FAMILIES = {
    "LlamaForCausalLM": Family(ignored=_WINDOW | _EXPERTS),
    "MistralForCausalLM": Family(
        ignored=_WINDOW_SWITCHES | _EXPERTS | _BIAS,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "MixtralForCausalLM": Family(
        ignored=_WINDOW_SWITCHES | _EXPERT_SWITCHES | _BIAS,
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": _QWEN2,  # and a draft head
    "Qwen3ForCausalLM": Family(
        has_qk_norm=True,
        ignored=_EXPERTS | {"mlp_bias"},
        defaults=_QWEN_WINDOW | {"max_window_layers": 28, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "DeepseekV3ForCausalLM": Family(
        has_latents=True,
        ignored=_WINDOW | _NOT_LATENT | {"mlp_layer_types"},
        defaults={"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
        | _LATENT_EXPERTS
        | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5},
    ),
    "Glm4MoeLiteForCausalLM": Family(
        has_latents=True,
        ignored=_WINDOW | _NOT_LATENT,
        defaults={"q_lora_rank": 768, "first_k_dense_replace": 1}
        | _LATENT_EXPERTS
        | {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
    ),
    "Qwen3MoeForCausalLM": Family(
        has_qk_norm=True,
        ignored=frozenset({"max_window_layers", "layer_types", "mlp_bias"}),
        defaults=_QWEN_WINDOW
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
}
