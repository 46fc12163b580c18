"""The supported architectures, and how each reads its config.json."""

from __future__ import annotations

from typing import Any

import msgspec


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Settings implied by the name of an architecture."""

    has_qk_norm: bool = False  # RMSNorm on each query and key head
    has_qkv_bias: bool = False  # queries, keys and values have a bias, regardless of config.json
    has_latents: bool = False  # latent attention, and experts with a biased choice among groups
    has_index: bool = False  # of these, layers whose tokens see those that an index chooses
    # Some of these layers take the choice of a layer before them, and neighbours are rotated together.
    shares_index: bool = False
    is_compressed: bool = False  # attention over a window and compressed rows, several streams, and hashed experts
    has_out_norms: bool = False  # RMSNorm on the outputs of attention and MLP, before they are added
    has_wide_norms: bool = False  # norms have float32 weights
    norm_offset: float = 0.0  # added to the stored weights of norms
    scales_embedding: bool = False  # embeddings are multiplied by the root of their size
    has_sinks: bool = False  # each head has a score that takes part in the softmax without a value
    has_states: bool = False  # layers of the gated delta rule, the others with gated attention and partial rotation
    has_fused_states: bool = False  # of these layers, the projections of a key head lie beside each other
    has_expert_bias: bool = False  # the router and both products of experts have biases
    quantizations: frozenset[str] = frozenset()  # ``quant_method`` of checkpoints that are unpacked when they are read
    # Fields of config.json that transformers does not read for it, in its spelling.
    ignored: frozenset[str] = frozenset()
    # Fields of ``_SPECIAL`` that it has.
    reads: frozenset[str] = frozenset()
    defaults: dict[str, Any] = {}  # values of fields that config.json omits
    # Names of a multimodal checkpoint's tensors that are not of its text model start with one of these.
    ignored_tensors: tuple[str, ...] = ()

    def complete(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Returns config.json without ignored fields and with defaults."""
        ignored = self.ignored | _SPECIAL - self.reads
        return self.defaults | {name: value for name, value in raw.items() if name not in ignored}


# Fields that few architectures have; the others do not read them.
_GEMMA = frozenset(
    {
        "hidden_activation",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "use_bidirectional_attention",
        "sliding_window_pattern",
    }
)
_GPT_OSS = frozenset({"swiglu_alpha", "swiglu_limit"})
_STATES = frozenset(
    {
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "full_attention_interval",
        "shared_expert_intermediate_size",
    }
)
_SPECIAL = _GEMMA | _GPT_OSS | _STATES

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
_GEMMA3 = Family(
    has_qk_norm=True,
    has_out_norms=True,
    has_wide_norms=True,
    norm_offset=1.0,
    scales_embedding=True,
    ignored=_EXPERTS | {"mlp_bias", "hidden_act", "use_sliding_window", "max_window_layers"},
    reads=_GEMMA,
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    ignored_tensors=("vision_tower.", "multi_modal_projector."),
)
_QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN2 = Family(
    has_qkv_bias=True,
    ignored=_EXPERTS | _BIAS,
    defaults=_QWEN_WINDOW | {"max_window_layers": 28, "num_key_value_heads": 32},
)

_STATE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_STATE_IGNORED = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "mlp_bias"})
_SHARED_EXPERTS: dict[str, Any] = {
    "intermediate_size": 5632,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}


def _qwen_states(ignored: frozenset[str] = frozenset(), *, is_fused: bool = False, **defaults: Any) -> Family:
    return Family(
        has_qk_norm=True,
        has_wide_norms=True,
        norm_offset=1.0,
        has_states=True,
        has_fused_states=is_fused,
        ignored=_STATE_IGNORED | ignored,
        reads=_STATES,
        defaults=_STATE_DEFAULTS | defaults,
        ignored_tensors=("model.visual.", "visual."),
    )


_QWEN35 = _qwen_states(
    _EXPERTS, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=32, num_key_value_heads=4
)
_QWEN35_MOE = _qwen_states(
    frozenset({"decoder_sparse_step", "mlp_only_layers"}),
    hidden_size=2048,
    num_hidden_layers=40,
    num_experts=256,
    num_experts_per_tok=8,
    **_SHARED_EXPERTS,
)

_NOT_LATENT = frozenset({"decoder_sparse_step", "mlp_only_layers", "mlp_bias", "head_dim", "num_key_value_heads"})
_LATENT_EXPERTS: dict[str, Any] = {"n_shared_experts": 1, "norm_topk_prob": True}
_WIDE_EXPERTS: dict[str, Any] = _LATENT_EXPERTS | {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
}
_INDEXED: dict[str, Any] = _WIDE_EXPERTS | {"index_head_dim": 128, "index_topk": 2048}

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
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GptOssForCausalLM": Family(
        has_wide_norms=True,
        has_sinks=True,
        has_expert_bias=True,
        quantizations=frozenset({"mxfp4"}),
        ignored=_EXPERT_SWITCHES | {"mlp_bias", "hidden_act", "use_sliding_window", "max_window_layers"},
        reads=_GPT_OSS,
        defaults={
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "dtype": "bfloat16",
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
        defaults={"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4} | _WIDE_EXPERTS,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        has_latents=True,
        ignored=_WINDOW | _NOT_LATENT,
        defaults={"q_lora_rank": 768, "first_k_dense_replace": 1}
        | _LATENT_EXPERTS
        | {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
    ),
    "DeepseekV32ForCausalLM": Family(
        has_latents=True,
        has_index=True,
        ignored=_WINDOW | _NOT_LATENT | {"rope_interleave", "indexer_rope_interleave"},
        defaults={"q_lora_rank": 1536, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "index_n_heads": 64}
        | _INDEXED,
    ),
    "GlmMoeDsaForCausalLM": Family(
        has_latents=True,
        has_index=True,
        shares_index=True,
        ignored=_WINDOW | _NOT_LATENT | {"rope_interleave"},
        defaults={"q_lora_rank": 2048, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "index_n_heads": 32}
        | _INDEXED,
    ),
    "DeepseekV4ForCausalLM": Family(
        is_compressed=True,
        has_wide_norms=True,
        ignored=frozenset({"decoder_sparse_step", "mlp_only_layers", "use_sliding_window", "max_window_layers"}),
        reads=frozenset({"rope_local_base_freq", "swiglu_limit"}),
        defaults={
            "vocab_size": 129_280,
            "hidden_size": 4096,
            "intermediate_size": 2048,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "q_lora_rank": 1024,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "sliding_window": 128,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 1_048_576,
            "num_nextn_predict_layers": 1,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5ForConditionalGeneration": _QWEN35,
    "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN35_MOE,
    "Qwen3NextForCausalLM": _qwen_states(
        is_fused=True,
        hidden_size=2048,
        num_hidden_layers=48,
        num_experts=512,
        num_experts_per_tok=10,
        num_nextn_predict_layers=1,  # its files have a head, of which config.json says nothing
        **_SHARED_EXPERTS | {"vocab_size": 151_936},
    ),
    "Qwen3MoeForCausalLM": Family(
        has_qk_norm=True,
        ignored=frozenset({"max_window_layers", "layer_types", "mlp_bias"}),
        defaults=_QWEN_WINDOW
        | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
}
