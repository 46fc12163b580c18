"""A model's shape, read from its folder without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from hiserve.config.settings import DType
from hiserve.core.activation import Activation
from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, carried_bytes, pack_heads
from hiserve.core.quantization import Quantization
from hiserve.core.step_memory import DEFAULT_PAGE_SIZE, ModelFacts, StepShape, StoredBytes
from hiserve.errors import ModelError
from hiserve.models import compressed_cache, head_cache, latent_cache
from hiserve.models.checkpoint import Download, fetch, is_hub_name
from hiserve.models.compressed_config import CompressedConfig, LayerKind, read_compressed
from hiserve.models.compressed_spelling import respell_compressed
from hiserve.models.config_fields import (
    ConfigFields,
    convert,
    read_json,
    read_windows,
    refuse_foreign,
    refuse_oversize,
    respell,
    which_slide,
)
from hiserve.models.delta_config import DeltaConfig, read_delta, read_partial_dim
from hiserve.models.experts_config import ExpertsConfig, packed_size, read_experts, read_hashed_experts
from hiserve.models.family import FAMILIES, Family
from hiserve.models.generation_config import GenerationConfig, SamplingDefaults, as_ids, read_generation
from hiserve.models.index_config import IndexConfig, read_index
from hiserve.models.latent_config import LatentConfig, read_latent
from hiserve.models.quantize import asks_for_packed, read_quantization, with_quantization
from hiserve.models.refusals import read_activation, read_architecture, refuse_nonsense, refuse_unsupported
from hiserve.models.rope import RopeConfig, read_local_rope, read_rope, stretched_context

NANO = "hiserve-nano"
STATE_PAGE_SIZE = 64


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and settings of a decoder."""

    architecture: str  # Hugging Face class name, for example ``LlamaForCausalLM``
    vocab_size: int  # rows of the embedding
    hidden_size: int  # width of the residual stream
    num_layers: int
    num_heads: int
    num_kv_heads: int  # key and value heads; divides ``num_heads``. One for latent attention, whose heads share a row
    head_dim: int  # elements per head; of latent attention those of a row
    intermediate_size: int  # width of the MLP
    norm_eps: float  # epsilon of every RMSNorm
    rope: RopeConfig  # rotary scaling
    local_rope: RopeConfig | None  # that of ``local_layers``; None if no layer has its own
    local_layers: frozenset[int]  # layers, counted from 0, with ``local_rope``
    # Of each layer: a token at position p sees positions above p - window; empty is none anywhere.
    windows: tuple[int | None, ...]
    context_length: int  # most tokens of a request
    tie_embeddings: bool  # the output head is the embedding
    embedding_scale: float  # factor of the embeddings, before it is rounded to their type
    logit_cap: float | None  # logits become ``cap * tanh(logits / cap)``
    score_scalar: float | None  # scores are scaled by its inverse square root; None is ``head_dim``
    activation: Activation  # of the MLP
    has_sinks: bool  # each head has a score that takes part in the softmax without a value (gpt-oss)
    has_out_norms: bool  # RMSNorm on the outputs of attention and MLP, before they are added (Gemma)
    has_wide_norms: bool  # norms have float32 weights, whatever the type of the others
    norm_offset: float  # added to the stored weights of norms
    has_qk_norm: bool  # RMSNorm on each query and key head before RoPE (Qwen3)
    has_qkv_bias: bool  # queries, keys and values have a bias (Qwen2)
    has_out_bias: bool  # the projection after attention has a bias
    has_mlp_bias: bool  # the three projections of the MLP have biases
    experts: ExpertsConfig | None  # replaces the MLP in some or all layers; None without
    num_mtp_layers: int  # draft heads in the checkpoint's own files
    delta: DeltaConfig | None = None  # layers with recurrent states in place of attention
    # Outputs of attention have gates, and of each head the first ``rotary_dim`` elements are rotated (Qwen3.5).
    has_attention_gates: bool = False
    partial_dim: int | None = None  # elements of a head that are rotated, where these are not all
    latent: LatentConfig | None = None  # latent attention in place of grouped-query attention
    index: IndexConfig | None = None  # of latent attention: an index chooses the tokens that a token sees
    # Likewise attention over a window and compressed rows, with several streams.
    compressed: CompressedConfig | None = None
    dtype: DType  # type name of the stored weights, or of those that quantized ones stand for
    quantization: Quantization | None = None
    packs_rows: bool = False  # the checkpoint was made for keys and values in 8 bits
    eos_token_ids: tuple[int, ...]  # tokens that end a reply
    bos_token_id: int | None  # token that starts a text, or None
    sampling_defaults: SamplingDefaults  # for requests that omit parameters

    @property
    def num_params(self) -> int:
        """Parameters, all experts counted and the tied output head once."""
        if self.compressed is not None and self.experts is not None:
            total = self.compressed.num_params(self.hidden_size, self.num_heads)
            total += self.num_layers * (2 * self.hidden_size + self.experts.num_params(self.hidden_size))
            total += self.experts.hash_params(self.vocab_size) + self.hidden_size
            return total + self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * self.hidden_size * (queries + keys + 1)
        layer += 2 * self.hidden_size if self.has_out_norms else 0
        layer += 2 * self.head_dim if self.has_qk_norm else 0
        layer += queries + 2 * keys if self.has_qkv_bias else 0
        layer += self.hidden_size if self.has_out_bias else 0
        layer += self.num_heads if self.has_sinks else 0
        if self.latent is not None:
            layer = self.latent.num_params(self.hidden_size, self.num_heads) + 2 * self.hidden_size
        layer += queries * self.hidden_size if self.has_attention_gates else 0
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += 2 * self.intermediate_size + self.hidden_size if self.has_mlp_bias else 0
        total = self.num_attention_layers * layer + self.hidden_size
        if self.index is not None:
            total += self.index.num_params(self.hidden_size)
        if self.delta is not None:
            total += len(self.delta.layers) * (self.delta.num_params(self.hidden_size) + 2 * self.hidden_size)
        total += self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        if self.experts is None:
            return total + self.num_layers * mlp
        num_sparse = self.experts.num_layers(self.num_layers)
        sparse = num_sparse * self.experts.num_params(self.hidden_size)
        return total + (self.num_layers - num_sparse) * mlp + sparse

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        if self.compressed is not None:
            return self.compressed.rope_dim
        return (self.partial_dim or self.head_dim) if self.latent is None else self.latent.rope_dim

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_layers - (0 if self.delta is None else len(self.delta.layers))

    @property
    def slot_elements(self) -> int:
        """Elements that a token stores, all layers together, but for rows that stand for several tokens."""
        num_planes = 2 if self.latent is None and self.compressed is None else 1
        keys = 0 if self.index is None else self.index.slot_elements
        return num_planes * self.num_attention_layers * self.num_kv_heads * self.head_dim + keys

    def facts(self) -> ModelFacts:
        """Returns the facts that ``core.resolve`` needs."""
        num_planes = 2 if self.compressed is None else 1
        attention_elements = 0 if self.latent is None else self.latent.step_elements(self.num_heads)
        if self.index is not None and self.latent is not None:  # tokens are attended to in two parts
            attention_elements += self.index.step_elements() + self.num_heads * self.latent.head_elements
        if self.compressed is not None:
            attention_elements = self.compressed.step_elements(self.num_heads, self.hidden_size)
        return ModelFacts(
            context_length=self.context_length,
            checkpoint_dtype=self.dtype,
            num_params=self.num_params,
            packed_experts=packed_size(self.experts, self.quantization, self.hidden_size, self.num_layers),
            slot_elements=self.slot_elements,
            window=self.tail_window,
            window_elements=num_planes * self._num_windows * self.num_kv_heads * self.head_dim,
            ratio_elements=() if self.compressed is None else compressed_cache.ratio_elements(self.compressed),
            packed=self.packed_bytes,
            asks_for_packed=self.packs_rows,
            page_size=self._page_size,
            page_multiple=1 if self.compressed is None else compressed_cache.page_multiple(self.compressed),
            carried=carried_bytes(lambda dtype, drafts: self.cache_plan(dtype, frees_windows=False, max_draft=drafts)),
            step=StepShape(
                num_layers=self.num_layers,
                hidden_size=self.hidden_size,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                mlp_elements=self._mlp_elements(),
                vocab_size=self.vocab_size,
                latent_elements=attention_elements,
                index_ratio=self.compressed.index_ratio if self.compressed is not None else int(self.index is not None),
            ),
        )

    @property
    def _page_size(self) -> int:
        """Tokens of a page under ``auto``: with states more, because a prefix can be resumed at few of its boundaries anyway."""
        if self.compressed is not None:
            return compressed_cache.compressed_page_size(self.compressed)
        return DEFAULT_PAGE_SIZE if self.delta is None else STATE_PAGE_SIZE

    def _mlp_elements(self) -> int:
        """Elements per token in the MLP (gate, up and their product), in its experts, outputs included, or beside a state."""
        elements = 3 * self.intermediate_size
        if self.experts is not None:
            elements = max(elements, self.experts.step_elements(self.hidden_size))
        return elements if self.delta is None else max(elements, self.delta.step_elements())

    def kv_groups(self, dtype: str, *, packs_rows: bool = False) -> tuple[CacheGroupSpec, ...]:
        """Returns the KV groups of its layers, stored as ``dtype``: one, but for compressed attention and beside an index."""
        if self.compressed is not None or self.index is not None:
            return self.cache_plan(dtype, frees_windows=False, packs_rows=packs_rows).groups
        groups = (self._kv_group(dtype, packs_rows=packs_rows),)
        return pack_heads(groups) if packs_rows and self.packed_bytes is not None else groups

    @property
    def packed_bytes(self) -> StoredBytes | None:
        """Bytes of what attention reads in 8 bits; None if it cannot be packed."""
        if self.compressed is not None:
            return compressed_cache.packed_bytes(self.compressed)
        if self.latent is not None:
            return latent_cache.packed_bytes(self.latent, self.index, self.num_layers)
        return head_cache.packed_bytes(self.num_attention_layers, self._num_windows, self.num_kv_heads, self.head_dim)

    @property
    def _num_windows(self) -> int:
        """Layers with a window, if others have none."""
        return sum(window is not None for window in self.windows) if self.tail_window else 0

    def _kv_group(self, dtype: str, *, packs_rows: bool = False) -> CacheGroupSpec:
        if self.latent is not None:
            packs = packs_rows and self.packed_bytes is not None
            return latent_cache.latent_group(self.latent, self.num_layers, dtype, packs_rows=packs)
        return CacheGroupSpec(
            name="kv",
            num_layers=self.num_attention_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )

    @property
    def tail_window(self) -> int:
        """The widest window, if other layers have none: these need pages of their own; else 0."""
        if self.compressed is not None:
            return self.compressed.window if self.compressed.ratios else 0
        widths = [window for window in self.windows if window is not None]
        return max(widths) if self.latent is None and 0 < len(widths) < len(self.windows) else 0

    def cache_plan(self, dtype: str, *, frees_windows: bool, max_draft: int = 0, packs_rows: bool = False) -> CachePlan:
        """Returns the groups of its layers, stored as ``dtype``: one; two with an index or freed windows; beside states three.

        ``max_draft`` is the most drafts of a row in a step, by which what rows carry along is sized. ``packs_rows``: what
        attention reads is in 8 bits.
        """
        if self.compressed is not None:
            frees = frees_windows and self.tail_window > 0
            return compressed_cache.compressed_plan(
                self.compressed, dtype, frees_windows=frees, max_draft=max_draft, packs_rows=packs_rows
            )
        kv = self._kv_group(dtype, packs_rows=packs_rows)
        if self.index is not None:
            return self.index.cache_plan(kv, packs_rows=packs_rows)
        if self.delta is not None:
            plan = self.delta.cache_plan(kv, self.num_layers, max_draft)
        else:
            plan = head_cache.heads_plan(kv, self.windows, frees_windows=frees_windows and self.tail_window > 0)
        return head_cache.packed_plan(plan) if packs_rows and self.packed_bytes is not None else plan


def find_model(name: str, revision: str | None = None, *, download: Download | None = None) -> Path:
    """Returns the folder of a model: a local one, the embedded one, or one of the Hugging Face Hub.

    Args:
        name: A path, ``hiserve-nano``, or ``owner/name`` on the Hub, tried in this order.
        revision: Branch, tag or commit on the Hub; None is the main branch.
        download: As for ``checkpoint.fetch``.

    Raises:
        ModelError: There is no such folder or model, it has no config.json, or it cannot be fetched.
    """
    try:
        folder = Path(name).expanduser()
        is_there = bool(name) and folder.is_dir()
    except (OSError, RuntimeError, ValueError):  # name too long, ``~`` of an unknown user, null byte
        is_there = False
    if not is_there and name == NANO:
        return Path(__file__).parent / "nano"
    if not is_there and is_hub_name(name):
        return fetch(name, revision, download)
    if not is_there:
        raise ModelError(
            f"no model folder at {name!r}. Give a folder with config.json and safetensors, a model of the Hugging Face "
            f"Hub as owner/name, or {NANO}.",
            param="model",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name!r} has no config.json; it is not a Hugging Face checkpoint folder.", param="model")
    return folder


def read_model_config(folder: Path) -> ModelConfig:
    """Reads ``config.json``, and ``generation_config.json`` for end tokens and sampling defaults.

    Raises:
        ModelError: Unsupported architecture, a missing field, an invalid value, or a file that is not JSON.
    """
    path = folder / "config.json"
    return parse_config(with_quantization(read_json(path), folder), path, read_generation(folder))


def parse_config(raw: dict[str, Any], path: Path, generation: GenerationConfig) -> ModelConfig:
    """Returns the configuration of the fields ``raw`` of ``config.json``; ``path`` is for messages.

    Raises:
        ModelError: As ``read_model_config``.
    """
    architecture = read_architecture(raw.get("architectures"))
    family = FAMILIES[architecture]
    spelled = family.complete(respell(raw, path))
    if family.is_compressed:
        spelled = respell_compressed(spelled, path)
    else:
        refuse_foreign(spelled, architecture, has_index=family.has_index)
    fields = _checked(spelled, path, architecture)
    heads = fields.num_attention_heads
    latent = read_latent(fields) if family.has_latents else None
    index = read_index(spelled, fields, path, shares=family.shares_index) if family.has_index else None
    compressed = read_compressed(spelled, fields, path) if family.is_compressed else None
    delta = read_delta(fields, is_interleaved=family.has_fused_states) if family.has_states else None
    kv_heads, head_dim = _key_shape(fields, latent)
    dtype = fields.dtype or "float32"
    refuse_nonsense(fields, path.parent, kv_heads, head_dim, dtype)
    partial_dim = read_partial_dim(fields, head_dim) if family.has_states else None
    special = latent or compressed
    rotary_dim = partial_dim or (head_dim if special is None else special.rope_dim)
    ends = as_ids(fields.eos_token_id) if generation.eos_token_ids is None else generation.eos_token_ids
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
        **_layer_fields(fields, family, compressed, rotary_dim),
        tie_embeddings=bool(fields.tie_word_embeddings),
        embedding_scale=fields.hidden_size**0.5 if family.scales_embedding else 1.0,
        logit_cap=fields.final_logit_softcapping,
        score_scalar=fields.query_pre_attn_scalar,
        activation=read_activation(fields, family),
        has_sinks=family.has_sinks,
        has_out_norms=family.has_out_norms,
        has_wide_norms=family.has_wide_norms,
        norm_offset=family.norm_offset,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias or bool(fields.attention_bias),
        has_out_bias=bool(fields.attention_bias),
        has_mlp_bias=bool(fields.mlp_bias),
        latent=latent,
        index=index,
        compressed=compressed,
        delta=delta,
        has_attention_gates=family.has_states,
        partial_dim=partial_dim,
        num_mtp_layers=fields.num_nextn_predict_layers or 0,
        dtype=cast(DType, dtype),
        quantization=read_quantization(fields, architecture),
        packs_rows=asks_for_packed(fields.quantization_config),
        eos_token_ids=ends or (),
        bos_token_id=fields.bos_token_id,
        sampling_defaults=generation.sampling_defaults,
    )


def _key_shape(fields: ConfigFields, latent: LatentConfig | None) -> tuple[int, int]:
    """Returns key and value heads, and elements of a head."""
    if latent is not None:
        return 1, latent.width
    heads = fields.num_attention_heads
    return fields.num_key_value_heads or heads, fields.head_dim or fields.hidden_size // heads


def _layer_fields(
    fields: ConfigFields, family: Family, compressed: CompressedConfig | None, rotary_dim: int
) -> dict[str, Any]:
    """Returns what differs from layer to layer: rotations, windows and experts; and the longest context."""
    rope, local_rope = read_rope(fields, rotary_dim), read_local_rope(fields, rotary_dim)
    local_rope = None if local_rope == rope else local_rope
    context_length = stretched_context(fields, rope)
    if compressed is None:
        slides = [] if local_rope is None else which_slide(fields)
        windows = () if family.has_states else read_windows(fields, context_length)
        experts = read_experts(fields, has_groups=family.has_latents, has_bias=family.has_expert_bias)
    else:
        slides, experts = [kind is LayerKind.WINDOW for kind in compressed.kinds], read_hashed_experts(fields)
        windows = (compressed.window,) * len(slides)
    local_layers = [] if local_rope is None else [layer for layer, each in enumerate(slides) if each]
    return {
        "rope": rope,
        "local_rope": local_rope if local_layers else None,
        "local_layers": frozenset(local_layers),
        "windows": windows,
        "experts": experts,
        "context_length": context_length,
    }


def _checked(spelled: dict[str, Any], path: Path, architecture: str) -> ConfigFields:
    """Returns fields of which each by itself is supported."""
    fields = convert(spelled, ConfigFields, path)
    refuse_oversize(fields, path)
    refuse_unsupported(fields, architecture, has_partial_rotation=FAMILIES[architecture].has_states)
    return fields
