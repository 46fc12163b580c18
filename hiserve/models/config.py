"""A model's shape, read from its folder without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hiserve.config import DTYPE_BYTES, MAX_INT32
from hiserve.core.groups import CacheGroupSpec
from hiserve.core.resolve import ModelFacts
from hiserve.errors import ModelError

NANO = "hiserve-nano"

Size = Annotated[int, Meta(ge=1, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
# A finite bound also refuses NaN and Infinity, which Python's JSON reader lets through.
Positive = Annotated[float, Meta(gt=0, le=1e30)]


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
        """Returns what ``core.resolve`` must know."""
        return ModelFacts(
            context_length=self.context_length,
            checkpoint_dtype=self.dtype,
            num_params=self.num_params,
            slot_elements=2 * self.num_layers * self.num_kv_heads * self.head_dim,
            vocab_size=self.vocab_size,
        )

    def kv_groups(self, dtype: str) -> tuple[CacheGroupSpec, ...]:
        """Returns the KV groups its layers write, stored as ``dtype``: one, as in every dense decoder."""
        kv = CacheGroupSpec(
            name="kv",
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        return (kv,)


# Architectures the one decoder serves; the value is has_qk_norm.
ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}

_T = TypeVar("_T", bound=msgspec.Struct)


class _RopeFields(msgspec.Struct):
    """``rope_parameters``, or ``rope_scaling`` as older files call it."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None


class _Fields(msgspec.Struct):
    """The fields of ``config.json`` that are read, in both spellings, with their types and ranges."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    rms_norm_eps: Positive
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rope_parameters: _RopeFields | None = None
    rope_scaling: _RopeFields | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    bos_token_id: TokenId | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    use_sliding_window: bool | None = None
    hidden_act: str | None = None
    quantization_config: Any = None


class _GenerationFields(msgspec.Struct):
    """The field of ``generation_config.json`` that is read."""

    eos_token_id: TokenId | list[TokenId] | None = None


def find_model(name: str) -> Path:
    """Returns the folder of a model: a path, or ``hiserve-nano`` for the embedded one.

    Raises:
        ModelError: There is no such folder, or it has no config.json.
    """
    try:
        folder = Path(__file__).parent / "nano" if name == NANO else Path(name).expanduser()
        is_there = bool(name) and folder.is_dir()
    except (OSError, RuntimeError):  # a name too long for the file system; ``~`` of nobody
        is_there = False
    if not is_there:
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
        ModelError: Unsupported architecture, a missing field, a value that makes no sense, or a
            file that is not JSON.
    """
    raw = _read_json(folder / "config.json")
    architecture = _architecture(raw.get("architectures"))
    fields = _convert(raw, _Fields, folder / "config.json")
    rope = fields.rope_parameters or fields.rope_scaling or _RopeFields()
    _refuse_unsupported(fields, rope, architecture)
    heads = fields.num_attention_heads
    kv_heads = fields.num_key_value_heads or heads
    head_dim = fields.head_dim or fields.hidden_size // heads
    dtype = fields.dtype or fields.torch_dtype or "float32"
    nonsense = {
        f"{heads} attention heads are not a multiple of {kv_heads} key-value heads": heads % kv_heads,
        f"hidden_size {fields.hidden_size} is not a multiple of its {heads} attention heads, and head_dim is not given": (
            fields.head_dim is None and fields.hidden_size % heads
        ),
        f"head_dim {head_dim} is odd, but RoPE turns pairs": head_dim % 2,
        f"dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}": dtype not in DTYPE_BYTES,
    }
    for fact, is_so in nonsense.items():
        if is_so:
            raise ModelError(f"config.json in {str(folder)!r} makes no sense: {fact}.", param="model")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        num_layers=fields.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.rms_norm_eps,
        rope_theta=rope.rope_theta or fields.rope_theta or 10_000.0,
        context_length=fields.max_position_embeddings,
        tie_embeddings=bool(fields.tie_word_embeddings),
        has_qk_norm=ARCHITECTURES[architecture],
        dtype=dtype,
        eos_token_ids=_end_tokens(folder, fields),
        bos_token_id=fields.bos_token_id,
    )


def _architecture(given: Any) -> str:
    """Returns the one architecture a checkpoint names."""
    name = given[0] if isinstance(given, list) and given else given or "(none given)"
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"architecture {name} is not supported. Supported: {', '.join(sorted(ARCHITECTURES))}.", param="model"
        )
    return name


def _end_tokens(folder: Path, fields: _Fields) -> tuple[int, ...]:
    """Returns the end tokens; what ``generation_config.json`` says goes first."""
    path = folder / "generation_config.json"
    given = _convert(_read_json(path), _GenerationFields, path).eos_token_id if path.is_file() else None
    ends = fields.eos_token_id if given is None else given
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)


def _refuse_unsupported(fields: _Fields, rope: _RopeFields, architecture: str) -> None:
    scaling = rope.rope_type or rope.type or "default"
    refused = {
        "attention_bias": fields.attention_bias,
        "mlp_bias": fields.mlp_bias,
        "use_sliding_window": fields.use_sliding_window,
        f"hidden_act {fields.hidden_act}": fields.hidden_act not in (None, "silu"),
        f"RoPE scaling {scaling}": scaling != "default",
        "partial_rotary_factor": {fields.partial_rotary_factor, rope.partial_rotary_factor} - {None, 1.0},
        "quantization_config": fields.quantization_config,
    }
    named = [name for name, is_set in refused.items() if is_set]
    if named:
        raise ModelError(f"{architecture} with {', '.join(named)} is not supported yet.", param="model")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror}.", param="model") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} in {str(path.parent)!r} is not valid JSON: {error}.", param="model") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} in {str(path.parent)!r} is not a JSON object.", param="model")
    return found


def _convert(raw: dict[str, Any], kind: type[_T], path: Path) -> _T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path.name} in {str(path.parent)!r} makes no sense: {error}.", param="model") from None
