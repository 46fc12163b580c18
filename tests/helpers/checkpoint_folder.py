"""Checkpoint folders without weights: a Llama's config.json, with changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def folder(place: Path, without: tuple[str, ...] = (), generation: Any = None, **changes: Any) -> Path:
    """Writes a checkpoint folder without weights."""
    raw = {name: value for name, value in (LLAMA | changes).items() if name not in without}
    (place / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (place / "generation_config.json").write_text(json.dumps(generation))
    return place
