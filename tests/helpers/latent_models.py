"""Tiny random models with latent attention, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hiserve.attention import chosen_prompts, indexed, latent

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "routed_scaling_factor": 1.7,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# What makes each family itself, beyond SHAPE; the key is transformers' ``model_type``.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN},
    "glm4_moe_lite": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
# Families with an index: with that many heads no score is 0 of all of them, and ties are rare.
_INDEX: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12, "first_k_dense_replace": 1}
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": _INDEX | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    "glm_moe_dsa": _INDEX
    | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
    | {"n_group": 1, "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


def expand_from(num_tokens: int, patch: pytest.MonkeyPatch) -> None:
    """Lets rows with so many new tokens be expanded, five tokens of a prefix at a time, or thirty where an index chooses."""
    patch.setattr(latent.LatentAttention.__init__, "__defaults__", (num_tokens, None))
    patch.setattr(indexed.IndexedAttention.__init__, "__defaults__", (num_tokens,))
    patch.setattr(latent, "EXPANDED_KEYS", 5)
    patch.setattr(latent, "EXPANDED_BYTES", 0)
    patch.setattr(chosen_prompts, "most_keys", lambda shape: 30)
    patch.setattr(chosen_prompts, "BLOCK_KEYS", 4)


def save_latent(family: str, folder: Path, *, save: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """Saves a random model of a family, with uneven norms, and biases that change the choice of experts.

    Args:
        family: A key of ``FAMILIES`` or ``INDEXED``.
        folder: Where.
        save: Arguments of ``save_pretrained``.
        **overrides: As in transformers' config.
    """
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SHAPE | (FAMILIES | INDEXED)[family] | overrides)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder, **save or {})
    return folder


def save_with_mtp(family: str, folder: Path, *, is_right: bool = False, **overrides: Any) -> Path:
    """Saves a random model whose last layer is its draft head, in the names of DeepSeek's checkpoints.

    Args:
        family: A key of ``FAMILIES`` or ``INDEXED``.
        folder: Where.
        is_right: The next token depends on the token alone, by embedding and output head, and the head knows it.
        **overrides: As in transformers' config, of the model with one layer more.
    """
    num_layers = SHAPE["num_hidden_layers"]
    if family in INDEXED:
        overrides = {"indexer_types": ["full", "shared", "full", "full"]} | overrides
    save_latent(family, folder, num_hidden_layers=num_layers + 1, **overrides)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    for name in ("mlp_layer_types", "layer_types"):
        config.pop(name, None)
    path.write_text(json.dumps(config | {"first_k_dense_replace": 1}))
    torch.manual_seed(8)
    head, hidden = f"model.layers.{num_layers}.", SHAPE["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{head}{name}.weight"] = torch.rand(hidden) + 0.5
    tensors[head + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    tensors[head + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[head + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if is_right:
        for name in [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]:
            tensors[name].zero_()
        for name in ("enorm", "shared_head.norm"):
            tensors[f"{head}{name}.weight"] = torch.ones(hidden)
        tensors["model.norm.weight"] = torch.ones(hidden)
        tensors[head + "eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    save_file(tensors, folder / "model.safetensors")
    return folder
