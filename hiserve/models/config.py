"""A model's shape, read from its folder without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from hiserve.config import ModelFacts
from hiserve.errors import ModelError

NANO = "hiserve-nano"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and settings of a dense decoder.

    Attributes:
        architecture: Hugging Face class name, for example ``LlamaForCausalLM``.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Elements per head.
        intermediate_size: Width of the MLP.
        norm_eps: Epsilon of every RMSNorm.
        rope_theta: Base of the rotary frequencies.
        context_length: ``max_position_embeddings``.
        tie_embeddings: The output head is the embedding.
        has_qk_norm: RMSNorm on each query and key head before RoPE (Qwen3).
        dtype: Type name of the stored weights.
        eos_token_ids: Tokens that end a reply.
        bos_token_id: Token that starts a text, or None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    context_length: int
    tie_embeddings: bool
    has_qk_norm: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def num_params(self) -> int:
        """Parameters, the tied output head counted once."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2)
        layer += 2 * self.head_dim if self.has_qk_norm else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def facts(self) -> ModelFacts:
        """Returns what ``config.resolve`` must know."""
        return ModelFacts(
            context_length=self.context_length,
            checkpoint_dtype=self.dtype,
            num_params=self.num_params,
            slot_elements=2 * self.num_layers * self.num_kv_heads * self.head_dim,
            vocab_size=self.vocab_size,
        )


# Architectures the one decoder serves; the value is has_qk_norm.
ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}


def find_model(name: str) -> Path:
    """Returns the folder of a model: a path, or ``hiserve-nano`` for the embedded one.

    Raises:
        ModelError: There is no such folder, or it has no config.json.
    """
    folder = Path(__file__).parent / "nano" if name == NANO else Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"no model folder at {name!r}. Give a folder with config.json and safetensors, or {NANO}.",
            param="model",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name!r} has no config.json; it is not a Hugging Face checkpoint folder.", param="model")
    return folder


def read_model_config(folder: Path) -> ModelConfig:
    """Reads ``config.json`` (and ``generation_config.json`` for the end tokens).

    Raises:
        ModelError: Unsupported architecture, a missing field, or a file that is not JSON.
    """
    raw = _read_json(folder / "config.json")
    architecture = (raw.get("architectures") or ["(none given)"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture} is not supported. Supported: {', '.join(sorted(ARCHITECTURES))}.",
            param="model",
        )
    _refuse_unsupported(raw, architecture)
    generation = folder / "generation_config.json"
    ends = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    ends = raw.get("eos_token_id") if ends is None else ends
    try:
        heads = int(raw["num_attention_heads"])
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            intermediate_size=int(raw["intermediate_size"]),
            norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=_rope(raw),
            context_length=int(raw["max_position_embeddings"]),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            has_qk_norm=ARCHITECTURES[architecture],
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (int(ends),),
            bos_token_id=raw.get("bos_token_id"),
        )
    except KeyError as missing:
        raise ModelError(f"config.json in {str(folder)!r} lacks {missing.args[0]!r}.", param="model") from None


def _rope(raw: dict[str, Any]) -> float:
    """Reads the rotary base in both spellings: ``rope_parameters`` and ``rope_theta``."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise ModelError(f"RoPE scaling {kind!r} is not supported yet; only unscaled RoPE is.", param="model")
    return float(parameters.get("rope_theta") or raw.get("rope_theta") or 10_000.0)


def _refuse_unsupported(raw: dict[str, Any], architecture: str) -> None:
    refused = {
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "quantization_config": "quantization_config" in raw,
    }
    named = [name for name, present in refused.items() if present]
    if named:
        raise ModelError(f"{architecture} with {', '.join(named)} is not supported yet.", param="model")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path.name} in {str(path.parent)!r} is not valid JSON: {error}.", param="model") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} in {str(path.parent)!r} is not a JSON object.", param="model")
    return found
