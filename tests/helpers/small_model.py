"""A model of two layers with hiserve-nano's tokenizer and draft heads of its own, for tests of what becomes of tokens and pages.

A step takes a fraction of hiserve-nano's, most of which is reading weights. Weights are drawn, and yet replies do not
repeat themselves: the embedding of the last token is most of what the output layer reads, which is not tied to it, and
layers add what depends on the tokens before. Heads pass that embedding on, so some of what they draft is right.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiserve.models.model_config import NANO, find_model
from tests.helpers.draft_heads import write
from tools.nano.export import generation_config, hf_config
from tools.nano.model import NanoConfig

# To compile hiserve-nano's takes longer than to make an engine of this model.
TEMPLATE = (
    "<|bos|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZE = 64
CONFIG = NanoConfig(
    vocab_size=4096,
    hidden_size=SIZE,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    rope_theta=1e5,
    max_positions=8192,
)
BORN = SIZE // 2  # dimensions of embeddings that are not 0: as many as the values of all heads have
OTHERS = 0.2  # what layers add to the residual stream, next to the embedding
SHARPNESS = 8.0  # of a head's attention: it sees the token itself, and others that are equal


@cache
def small_model() -> str:
    """Returns the folder of the model, made at the first call, with its heads in the subfolders ``eagle3`` and ``mtp``.

    The process that made it removes it when it ends.
    """
    folder, owner = Path(tempfile.mkdtemp(prefix="small_model_")), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder))
    save_small_model(folder)
    return str(folder)


def save_small_model(folder: Path, seed: int = 1) -> None:
    """Writes the model and its heads."""
    random = torch.Generator().manual_seed(seed)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    texts = json.loads((find_model(NANO) / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(texts | {"chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps(generation_config()))
    shape = hf_config(CONFIG) | {"tie_word_embeddings": False}
    tensors = {
        "model.embed_tokens.weight": torch.zeros(CONFIG.vocab_size, SIZE),
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": _drawn(random, CONFIG.vocab_size, SIZE, scale=4.0),
    }
    tensors["model.embed_tokens.weight"][:, :BORN] = torch.randn(CONFIG.vocab_size, BORN, generator=random)
    for number in range(CONFIG.num_layers):
        tensors |= _layer(random, f"model.layers.{number}.", SIZE)
    write(folder, shape, tensors)
    head: dict[str, Any] = shape | {"rope_theta": CONFIG.rope_theta}
    del head["rope_parameters"]
    _save_eagle3(random, folder / "eagle3", head, tensors["lm_head.weight"])
    _save_mtp(random, folder / "mtp", head)


def _save_eagle3(random: torch.Generator, folder: Path, shape: dict[str, Any], output: Tensor) -> None:
    """Its attention takes the state off the residual stream, and puts the embedding in its place."""
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    own = _layer(random, "midlayer.", 2 * SIZE)
    group, born = CONFIG.num_heads // CONFIG.num_kv_heads, torch.eye(SIZE)[:BORN]
    keys = SHARPNESS**0.5 * _drawn(random, BORN, BORN).view(CONFIG.num_kv_heads, -1, BORN)
    nothing = torch.zeros(SIZE, 2 * SIZE - BORN)
    own["midlayer.self_attn.q_proj.weight"] = torch.cat(
        [keys.repeat_interleave(group, dim=0).reshape(SIZE, BORN), nothing], dim=1
    )
    own["midlayer.self_attn.k_proj.weight"] = torch.cat([keys.reshape(BORN, BORN), nothing[:BORN]], dim=1)
    own["midlayer.self_attn.v_proj.weight"] = torch.cat([born, -born], dim=1)
    values = torch.zeros(SIZE, SIZE)  # of each of a group's heads an equal part
    for head in range(CONFIG.num_heads):
        for place in range(CONFIG.head_dim):
            values[head // group * CONFIG.head_dim + place, head * CONFIG.head_dim + place] = 1 / group
    own["midlayer.self_attn.o_proj.weight"] = values
    write(
        folder,
        shape
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": CONFIG.vocab_size,
            "target_hidden_size": SIZE,
            "eagle_config": layers,
        },
        own
        | {
            "midlayer.hidden_norm.weight": torch.ones(SIZE),
            "fc.weight": torch.cat([torch.eye(SIZE), _drawn(random, SIZE, SIZE, scale=0.05)], dim=1),
            "norm.weight": torch.ones(SIZE),
            "lm_head.weight": output,
        },
    )


def _save_mtp(random: torch.Generator, folder: Path, shape: dict[str, Any]) -> None:
    prefix = f"model.layers.{CONFIG.num_layers}."
    own = {
        "enorm.weight": torch.ones(SIZE),
        "hnorm.weight": torch.ones(SIZE),
        "eh_proj.weight": torch.cat([torch.eye(SIZE), _drawn(random, SIZE, SIZE, scale=0.05)], dim=1),
        "shared_head.norm.weight": torch.ones(SIZE),
    }
    write(
        folder,
        shape | {"architectures": ["LlamaForCausalLMNextN"], "num_nextn_predict_layers": 1},
        {prefix + name: tensor for name, tensor in own.items()} | _layer(random, prefix, SIZE),
    )


def _layer(random: torch.Generator, prefix: str, input_size: int) -> dict[str, Tensor]:
    """Draws a layer, whose attention reads ``input_size`` elements a token."""
    size, kv_size, ffn_size = SIZE, CONFIG.num_kv_heads * CONFIG.head_dim, CONFIG.ffn_size
    return {
        f"{prefix}self_attn.q_proj.weight": _drawn(random, size, input_size, scale=2.0),
        f"{prefix}self_attn.k_proj.weight": _drawn(random, kv_size, input_size, scale=2.0),
        f"{prefix}self_attn.v_proj.weight": _drawn(random, kv_size, input_size),
        f"{prefix}self_attn.o_proj.weight": _drawn(random, size, size, scale=OTHERS),
        f"{prefix}mlp.gate_proj.weight": _drawn(random, ffn_size, size),
        f"{prefix}mlp.up_proj.weight": _drawn(random, ffn_size, size),
        f"{prefix}mlp.down_proj.weight": _drawn(random, size, ffn_size, scale=OTHERS),
        f"{prefix}input_layernorm.weight": torch.ones(size),
        f"{prefix}post_attention_layernorm.weight": torch.ones(size),
    }


def _drawn(random: torch.Generator, num_rows: int, num_columns: int, scale: float = 1.0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=random) * scale * num_columns**-0.5
