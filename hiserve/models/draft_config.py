"""Reads the shape of a draft head or draft model without torch, checks that it fits the model, and gives its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from hiserve.config.options import Options
from hiserve.config.settings import Settings
from hiserve.core.kv_groups import CacheGroupSpec, debug_groups, page_hidden_group, rename
from hiserve.core.step_memory import DraftFacts, DraftShape, ModelFacts
from hiserve.distributed.shard import Shard
from hiserve.errors import ConfigError, ModelError
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.checkpoint import tensor_names
from hiserve.models.compressed_names import table_of
from hiserve.models.config_fields import convert, read_json
from hiserve.models.draft_formats import (
    EAGLE3_FORMATS,
    MTP_SUFFIX,
    DraftFormat,
    EagleFields,
    Head,
    HeadFields,
    HeadKind,
    has_experts_behind,
    mtp_format,
    one_layer,
)
from hiserve.models.exactness import inexact_part
from hiserve.models.family import FAMILIES
from hiserve.models.generation_config import GenerationConfig
from hiserve.models.model_config import ModelConfig, find_model, parse_config, read_model_config
from hiserve.models.names import bundled_prefixes
from hiserve.models.quantized_names import kept_size
from hiserve.models.shards import absent_params, local_config, refuse_unshardable

DraftKind = Literal["eagle3", "mtp", "draft_model"]


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A draft head or draft model.

    Attributes:
        kind: ``eagle3``, ``mtp`` or ``draft_model``.
        folder: Of its checkpoint.
        model: Shape of a head's one layer, or of the draft model.
        aux_layers: Layers of the model, counted from 0, whose outputs it takes; the number of layers denotes the input
            of the output head.
        head: A head's own settings; None for a draft model.
    """

    kind: DraftKind
    folder: Path
    model: ModelConfig
    aux_layers: tuple[int, ...] = ()
    head: Head | None = None

    @property
    def feature_size(self) -> int:
        """Elements that it takes per token of the model, and carries from draft to draft."""
        return 0 if self.head is None else self.num_streams * self.model.hidden_size

    @property
    def num_streams(self) -> int:
        """Residual streams of each layer that a head takes."""
        return 1 if self.model.compressed is None else self.model.compressed.streams.count

    @property
    def shift(self) -> int:
        """The rotary position of token j is ``j - shift``."""
        return 0 if self.head is None else 1

    @property
    def num_params(self) -> int:
        """Parameters, without those shared with the model."""
        if self.head is None:
            return self.model.num_params
        pieces = [piece for stacked in self.head.table(self.model).values() for piece in stacked]
        return sum(piece.num_rows * (piece.shape[-1] if len(piece.shape) > 1 else 1) for piece in pieces)

    def local(self, shard: Shard) -> DraftConfig:
        """Returns a rank's share of it."""
        return msgspec.structs.replace(self, model=local_config(self.model, shard))

    def memory_shape(self, hidden_size: int) -> DraftShape:
        """Returns the sizes of its forwards, for a model of this ``hidden_size``."""
        return DraftShape(
            step=self.model.facts().step,
            shown_elements=len(self.aux_layers) * self.num_streams * hidden_size,
            feature_size=self.feature_size,
        )

    def kv_groups(self, dtype: str, *, packs_rows: bool = False) -> tuple[CacheGroupSpec, ...]:
        """Returns the KV groups of its layers, stored as ``dtype``, or packed as the model's."""
        return tuple(rename(group, "draft") for group in self.model.kv_groups(dtype, packs_rows=packs_rows))


def find_draft(kind: DraftKind, source: str | None, folder: Path, target: ModelConfig) -> DraftConfig:
    """Returns the draft head or draft model of a model.

    Args:
        kind: ``eagle3``, ``mtp`` or ``draft_model``.
        source: Its folder, or its name on the Hugging Face Hub. None is a head that came with the model: in its own
            files, or in a subfolder named after the kind.
        folder: Of the model.
        target: The model.

    Raises:
        ModelError: There is none, it cannot be used, or it does not fit.
    """
    try:
        if source is not None:
            found = find_model(source)
        else:
            found = folder if kind == "mtp" and target.num_mtp_layers else folder / kind
            if not (found / "config.json").is_file():
                raise ModelError(f"no {kind} came with the model in {str(folder)!r}. Name the folder of one.")
        return read_draft_model(found, folder, target) if kind == "draft_model" else read_head(kind, found, target)
    except ModelError as error:
        raise ModelError(error.message, param="spec") from None


def read_draft_model(folder: Path, target_folder: Path, target: ModelConfig) -> DraftConfig:
    """Reads the shape of a draft model.

    Raises:
        ModelError: It is not supported, or it has another vocabulary.
    """
    model = read_model_config(folder)
    if model.vocab_size != target.vocab_size:
        raise _misfit("The draft model", folder, f"it has {model.vocab_size} tokens, the model {target.vocab_size}")
    for part, is_there in (("layers with compressed rows", model.compressed), ("layers with an index", model.index)):
        if is_there is not None:
            raise _misfit("The draft model", folder, f"its {part} are supported in the model alone")
    ours, theirs = (_vocabulary(each) for each in (target_folder, folder))
    if ours is not None and theirs is not None and ours != theirs:
        raise _misfit("The draft model", folder, "its tokenizer.json gives tokens other numbers than the model's")
    return DraftConfig(kind="draft_model", folder=folder, model=model)


def read_head(kind: HeadKind, folder: Path, target: ModelConfig) -> DraftConfig:
    """Reads the shape of a head, and checks it against its target model.

    ``folder`` is the model's own if the head is in the model's files.

    Raises:
        ModelError: Another kind of head, an unsupported or invalid one, or one that does not fit.
    """
    path = folder / "config.json"
    return _read_head(kind, read_json(path), path, target)


def read_shape_head(shape: str, folder: Path, target: ModelConfig) -> DraftConfig:
    """Returns the MTP head of a built-in shape, which has weights as the shape itself has.

    Raises:
        ModelError: The shape has none.
    """
    if not target.num_mtp_layers:
        raise ModelError(f"--shape {shape} has no mtp head. Leave --spec out, or name a head.", param="spec")
    return _read_head("mtp", SHAPES[shape], folder / "config.json", target)


def _read_head(kind: HeadKind, raw: dict[str, Any], path: Path, target: ModelConfig) -> DraftConfig:
    folder, architecture = path.parent, _architecture(raw)
    if kind == "eagle3" and architecture in EAGLE3_FORMATS:
        draft = _read_eagle3(EAGLE3_FORMATS[architecture], raw, path, target)
    elif kind == "mtp" and architecture.removesuffix(MTP_SUFFIX) in FAMILIES:
        draft = _read_mtp(architecture.removesuffix(MTP_SUFFIX), raw, path, target)
    else:
        known = EAGLE3_FORMATS if kind == "eagle3" else [name + MTP_SUFFIX for name in FAMILIES]
        raise ModelError(
            f"architecture {architecture} of {str(folder)!r} is no {kind} head that is supported. Supported: "
            f"{', '.join(sorted(known))}."
        )
    _refuse_misfit(draft, target)
    return draft


def _read_eagle3(form: DraftFormat, raw: dict[str, Any], path: Path, target: ModelConfig) -> DraftConfig:
    fields = convert(raw, HeadFields, path)
    layer = raw.get(form.nested, {}) if form.nested else raw
    if not isinstance(layer, dict) or layer.get("model_type") not in (None, "llama"):
        raise _unsupported(form, path.parent, f"{form.nested} of another kind than llama")
    model = parse_config(layer | {"architectures": ["LlamaForCausalLM"]}, path, GenerationConfig())
    eagle = fields.eagle_config or EagleFields()
    refused = {
        f"{model.num_layers} layers": model.num_layers != 1,
        "a bias of fc": fields.bias,
        "fc_norm": fields.fc_norm,
        "use_aux_norm": fields.use_aux_norm,
        # Ambiguous: either a norm before the output head, which is always there, or the state that is carried.
        "norm_output": fields.norm_output,
        "use_aux_hidden_state false": eagle.use_aux_hidden_state is False,
        "no norm_before_residual, which engines assume differently": (
            form.nested is not None and fields.norm_before_residual is None
        ),
    }
    if named := [name for name, is_so in refused.items() if is_so]:
        raise _unsupported(form, path.parent, ", ".join(named))
    aux_layers = _aux_layers(form, fields, eagle, target)
    head = Head(
        format=form,
        target_layers=target.num_layers,
        target_hidden_size=fields.target_hidden_size or model.hidden_size,
        num_states=len(aux_layers),
        vocab_size=fields.draft_vocab_size or model.vocab_size,
        has_embedding=form.embedding is not None and form.embedding in tensor_names(path.parent),
        norm_before_residual=bool(fields.norm_before_residual),
        norm_before_fuse=bool(fields.norm_before_fc),
    )
    return DraftConfig(kind="eagle3", folder=path.parent, model=one_layer(model), aux_layers=aux_layers, head=head)


def _aux_layers(form: DraftFormat, fields: HeadFields, eagle: EagleFields, target: ModelConfig) -> tuple[int, ...]:
    """Returns the layers that EAGLE-3 takes; by default those that its authors chose."""
    given = (eagle if "eagle_config" in form.layers_field else fields).eagle_aux_hidden_state_layer_ids
    if given is None:
        return (1, target.num_layers // 2 - 1, target.num_layers - 4)
    return tuple(layer - form.names_inputs for layer in given)


def _read_mtp(base: str, raw: dict[str, Any], path: Path, target: ModelConfig) -> DraftConfig:
    form = mtp_format(base)
    model = parse_config(raw | {"architectures": [base]}, path, GenerationConfig())
    refused = {
        f"{model.num_mtp_layers} heads, one for each draft": model.num_mtp_layers != 1,
        "experts": has_experts_behind(model) and not (model.latent or model.compressed or model.delta),
        "drafts of DSpark": model.compressed is not None
        and any(name.startswith("mtp.1.") for name in tensor_names(path.parent)),
    }
    if named := [name for name, is_so in refused.items() if is_so]:
        raise _unsupported(form, path.parent, ", ".join(named))
    head = Head(
        format=form,
        target_layers=model.num_layers,
        target_hidden_size=model.hidden_size,
        num_states=1,
        vocab_size=model.vocab_size,
        is_in_model=_architecture(raw) == base,
    )
    aux_layers = (target.num_layers if form.sees_normed else target.num_layers - 1,)
    return DraftConfig(kind="mtp", folder=path.parent, model=one_layer(model), aux_layers=aux_layers, head=head)


def _refuse_misfit(draft: DraftConfig, target: ModelConfig) -> None:
    head, model = draft.head, draft.model
    assert head is not None
    seen = ", ".join(map(str, draft.aux_layers))
    shares = not head.has_embedding
    facts = {
        f"it was made for a hidden_size of {head.target_hidden_size}, the model's is {target.hidden_size}": (
            head.target_hidden_size != target.hidden_size
        ),
        f"its hidden_size is {model.hidden_size}, that of the model's embedding {target.hidden_size}, and it brings none": (
            shares and model.hidden_size != target.hidden_size
        ),
        f"it was made for {model.vocab_size} tokens, the model has {target.vocab_size}": (
            model.vocab_size != target.vocab_size
        ),
        f"it drafts {head.vocab_size} tokens, more than the model's {target.vocab_size}": (
            head.vocab_size > target.vocab_size
        ),
        f"it was made for a model of {head.target_layers} layers, this one has {target.num_layers}": (
            head.target_layers != target.num_layers
        ),
        f"it sees layers {seen}, counted from 0, but the model has {target.num_layers}": (
            draft.kind == "eagle3" and any(not 0 <= layer < target.num_layers for layer in draft.aux_layers)
        ),
        f"it sees layers {seen}, one of them twice; config.json must say which": len(set(draft.aux_layers))
        < len(draft.aux_layers),
        "it sees no layer at all": not draft.aux_layers,
    }
    if named := [fact for fact, is_so in facts.items() if is_so]:
        raise _misfit(f"The head ({head.format.title})", draft.folder, "; ".join(named))


def _misfit(title: str, folder: Path, fact: str) -> ModelError:
    return ModelError(
        f"{title} in {str(folder)!r} does not fit the model: {fact}. Name one that was made for this model, or leave --spec "
        "out."
    )


def _unsupported(form: DraftFormat, folder: Path, feature: str) -> ModelError:
    return ModelError(
        f"The head ({form.title}) in {str(folder)!r} cannot be used yet: it has {feature}. Name another one, or leave --spec "
        "out."
    )


def _architecture(raw: dict[str, Any]) -> str:
    given = raw.get("architectures")
    name = given[0] if isinstance(given, list) and given else given
    return name if isinstance(name, str) else "(none given)"


def _vocabulary(folder: Path) -> Any:
    """Returns the token numbers of a ``tokenizer.json``, or None without one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    raw = read_json(path)
    model, added = raw.get("model"), raw.get("added_tokens")
    numbers = {str(each.get("content")): each.get("id") for each in added or [] if isinstance(each, dict)}
    return model.get("vocab") if isinstance(model, dict) else None, numbers


_KINDS: dict[str, DraftKind] = {"eagle3": "eagle3", "mtp": "mtp", "draft": "draft_model"}


def read_draft(config: Options, folder: Path, model: ModelConfig) -> DraftConfig | None:
    """Returns the draft head or model that ``--spec`` names; None for proposers without a checkpoint.

    ``auto`` is the head that came with the model, if there is one and the model's weights are not dummies.

    Raises:
        ConfigError: There is no such proposer.
        ModelError: The checkpoint cannot be used, or does not fit the model.
    """
    spec = config.spec.spec
    name, _, source = spec.partition(":")
    if spec in ("off", "ngram"):
        return None
    if spec == "auto":
        if config.model.load_format == "dummy":
            return None  # a head cannot predict dummy weights
        bundled: DraftKind | None = "mtp" if _has_bundled_mtp(folder, model) else None
        if (folder / "eagle3" / "config.json").is_file():
            bundled = "eagle3"
        return None if bundled is None else find_draft(bundled, None, folder, model)
    if name not in _KINDS or (":" in spec and not source) or (name == "draft" and not source):
        raise ConfigError(
            f"--spec is {spec!r}. Use off, auto, ngram, eagle3, mtp, eagle3:PATH, mtp:PATH or draft:PATH.",
            param="spec",
        )
    if name == "mtp" and not source and config.model.shape is not None:
        return read_shape_head(config.model.shape, folder, model)
    return find_draft(_KINDS[name], source or None, folder, model)


def _has_bundled_mtp(folder: Path, model: ModelConfig) -> bool:
    """Whether the model's files have the heads that config.json tells of; a copy that was saved again may lack them."""
    prefixes = bundled_prefixes(model)
    return model.num_mtp_layers > 0 and any(name.startswith(prefixes) for name in tensor_names(folder))


def page_groups(
    config: Settings,
    model: ModelConfig,
    draft: DraftConfig | None,
    *,
    frees_windows: bool = False,
    max_draft: int | None = None,
) -> tuple[CacheGroupSpec, ...]:
    """Returns the groups of all pages and rows: the model's, those of drafts, and those for debugging.

    ``max_draft`` is the most drafts of a row in a step; None is what the settings say.
    """
    max_draft = config.spec.tiers[-1] if max_draft is None else max_draft
    dtype, drafts = config.model.dtype, tuple[CacheGroupSpec, ...]()
    if draft is not None:
        hidden = page_hidden_group(draft.feature_size, config.cache.page_size, dtype)
        drafts = (*draft.kv_groups(dtype, packs_rows=config.cache.packs_rows), hidden)
    plan = model.cache_plan(dtype, frees_windows=frees_windows, max_draft=max_draft, packs_rows=config.cache.packs_rows)
    return (*plan.groups, *drafts, *debug_groups(config.cache))


def model_facts(config: Options, folder: Path, model: ModelConfig) -> ModelFacts:
    """Returns the facts of a model and its draft that ``core.resolve`` needs.

    Raises:
        ConfigError, ModelError: As ``read_draft``.
    """
    draft, shard = read_draft(config, folder, model), Shard(0, config.parallel.tp)
    refuse_unshardable(model, shard.size)
    inexact = inexact_part(model)
    absent, model = absent_params(model, shard), local_config(model, shard)
    own = msgspec.structs.replace(model.facts(), num_params=model.num_params - absent, inexact=inexact)
    if model.quantization is not None:
        own = msgspec.structs.replace(own, quantized_linears=kept_size(table_of(model), model.quantization))
    if draft is None:
        return own
    refuse_unshardable(draft.model, shard.size, name="the draft")
    draft = draft.local(shard)
    shape = draft.model
    facts = DraftFacts(
        kind=draft.kind,
        num_params=draft.num_params,
        packed_experts=shape.facts().packed_experts,
        slot_elements=shape.slot_elements,
        step=draft.memory_shape(model.hidden_size),
        packed=shape.facts().packed,
    )
    return msgspec.structs.replace(own, draft=facts)
