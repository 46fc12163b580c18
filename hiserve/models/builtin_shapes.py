"""Reads the model that the settings name: a checkpoint, or a built-in shape without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hiserve.config.options import Model
from hiserve.errors import ConfigError, ModelError
from hiserve.models.generation_config import GenerationConfig
from hiserve.models.model_config import ModelConfig, find_model, parse_config, read_model_config

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

# The fields that are read of the public config.json of Llama-3.1-8B, Qwen3-0.6B, Qwen3-8B, gpt-oss-20b and Gemma-3-27B; what
# the families fill in is left out.
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
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 24,
        "num_experts": 32,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
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
}


def shape_config(name: str) -> ModelConfig:
    """Returns a built-in shape. It has no end tokens, because it has no tokenizer."""
    return parse_config(SHAPES[name], Path(name) / "config.json", GenerationConfig())


def read_model(settings: Model) -> tuple[Path, ModelConfig]:
    """Returns the folder of the model that the settings name, and its shape.

    With a built-in shape the folder gives tokenizer, chat template, end tokens and sampling defaults, no weights.

    Raises:
        ConfigError: A built-in shape without dummy weights.
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
        return folder, model
    shape = shape_config(settings.shape)
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
