"""Reads the model that the settings name: a checkpoint, or a built-in shape without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hiserve.config.options import Model
from hiserve.errors import ConfigError, ModelError
from hiserve.models.generation_config import GenerationConfig
from hiserve.models.model_config import ModelConfig, find_model, parse_config, read_model_config
from hiserve.models.quantize import make_quantization

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

_V3: dict[str, Any] = _LATENT | {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163_840,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 24,
    "num_experts": 32,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

_V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _SLIDING, _SPARSE, _HEAVY, _SPARSE, _HEAVY],
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_rates": {_SPARSE: 4, _HEAVY: 128},
    "sliding_window": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1_048_576,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.125},
        "compress": {"rope_type": "default", "rope_theta": 1.6e5, "partial_rotary_factor": 0.125},
    },
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

_FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

# The fields that are read of the public config.json of Llama-3.1-8B, Qwen3-0.6B, Qwen3-8B, gpt-oss-20b, Gemma-3-27B,
# GLM-4.7-Flash and Qwen3.5-35B-A3B; of DeepSeek-V3 and V3.2 in full width, cut to 6 layers, of which 5 have 32 experts; and of
# DeepSeek-V4-Flash in full width, cut to 6 layers of all kinds with 64 experts; the last ones and gpt-oss also as they are
# released, with packed experts. What the families fill in is left out.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-20b-mxfp4": _GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
    "gemma-3-27b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "dtype": "bfloat16",
    },
    "glm-4.7-flash": _LATENT
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "vocab_size": 154_880,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "rope_theta": 1e6,
    },
    "v3-like": _V3 | {"architectures": ["DeepseekV3ForCausalLM"]},
    "v3.2-like": _V3
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "v4-flash-like": _V4_FLASH,
    "v4-flash-like-fp4": _V4_FLASH | {"quantization_config": _FP8_BLOCKS, "expert_dtype": "fp4"},
}


def shape_config(name: str) -> ModelConfig:
    """Returns a built-in shape. It has no end tokens, because it has no tokenizer."""
    return parse_config(SHAPES[name], Path(name) / "config.json", GenerationConfig())


def read_model(settings: Model) -> tuple[Path, ModelConfig]:
    """Returns the folder of the model that the settings name, and its shape.

    With a built-in shape the folder gives tokenizer, chat template, end tokens and sampling defaults, no weights.

    Raises:
        ConfigError: A built-in shape without dummy weights, a type of states for a model without any, or weights to quantize
            that are quantized.
        ModelError: As ``find_model`` and ``read_model_config``; or the folder's vocabulary is larger than the shape's.
    """
    if settings.shape is not None and settings.load_format != "dummy":
        raise ConfigError(
            f"--shape {settings.shape} is a shape without weights. Add --load-format dummy, or leave --shape out and "
            "name a checkpoint.",
            param="shape",
        )
    folder = find_model(settings.model, settings.revision)
    model = read_model_config(folder)
    if settings.shape is None:
        return folder, _as_asked(model, settings)
    shape = _as_asked(shape_config(settings.shape), settings)
    if model.vocab_size > shape.vocab_size:
        raise ModelError(
            f"the {model.vocab_size} tokens of {settings.model!r} are more than the {shape.vocab_size} of --shape "
            f"{settings.shape}. Leave the model out to take the tokenizer of hiserve-nano.",
            param="model",
        )
    text = {
        "eos_token_ids": model.eos_token_ids,
        "bos_token_id": model.bos_token_id,
        "sampling_defaults": model.sampling_defaults,
    }
    return folder, msgspec.structs.replace(shape, **text)


def _as_asked(model: ModelConfig, settings: Model) -> ModelConfig:
    """Returns a model whose weights are quantized and whose states are kept as the settings say.

    Raises:
        ConfigError: As ``_with_states``, or its weights are quantized already.
    """
    if settings.quantize != "off":
        if model.quantization is not None:
            raise ConfigError(
                f"--quantize is {settings.quantize}, but the weights of {settings.model!r} are quantized already, by "
                f"{model.quantization.method}. Leave it out.",
                param="quantize",
            )
        model = msgspec.structs.replace(model, quantization=make_quantization(settings.quantize))
    return _with_states(model, settings)


def _with_states(model: ModelConfig, settings: Model) -> ModelConfig:
    """Returns a model whose states are kept as the settings say.

    Raises:
        ConfigError: It has none, and the settings ask for another type than the default.
    """
    given = settings.state_dtype
    if model.delta is not None:
        return msgspec.structs.replace(model, delta=msgspec.structs.replace(model.delta, state_dtype=given))
    if given != Model().state_dtype:
        raise ConfigError(
            f"--state-dtype is {given}, but {settings.shape or settings.model!r} has no recurrent states. Leave it out.",
            param="state_dtype",
        )
    return model
