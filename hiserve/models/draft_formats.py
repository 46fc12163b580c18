"""Checkpoint formats of draft heads: tensor names, and settings that the format implies."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hiserve.models.compressed_config import LayerKind
from hiserve.models.compressed_names import stream_head_table
from hiserve.models.config_fields import Count, Size
from hiserve.models.experts_config import RootRouting
from hiserve.models.family import FAMILIES
from hiserve.models.model_config import ModelConfig
from hiserve.models.names import ExpertNaming, TensorSource, layer_table, stack

HeadKind = Literal["eagle3", "mtp"]


class DraftFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint format. Names may contain ``{num_layers}``, the number of layers of the head's model.

    Attributes:
        title: Its name in messages.
        kind: EAGLE-3 fuses states of several layers and reads them beside the embedding (Li et al., arXiv:2503.01840).
            MTP, multi-token prediction, joins the last states and the embedding into its own residual stream
            (DeepSeek-V3, arXiv:2412.19437).
        layer: Prefix of its decoder layer's tensor names.
        names: Names of the tensors outside the layer, by parameter.
        embedding: Name of an embedding that a checkpoint may have; without it the model's is shared. None if it is
            always the model's.
        prefix: Of all its names in the model's own files; None where that is ``layer``.
        ignored: Tensors that are not needed: copies of the model's, and those only for training.
        maps: Name of the tensor that maps its vocabulary to the model's; None if it has the model's.
        nested: Field of config.json that describes the decoder layer, if it is separate.
        layers_field: Field of config.json with the layers it takes: a name, or the names of nested fields.
        names_inputs: That field names layers whose inputs it takes; otherwise their outputs.
        sees_normed: MTP takes the model's states after the last norm; otherwise before.
        carries_normed: The next draft takes the state after the head's last norm; otherwise before.
        state_first: MTP's ``join`` takes the state first, then the embedding; otherwise in the other order.
        masks_first: The embedding counts as zero where the position is 0.
    """

    title: str
    kind: HeadKind
    layer: str
    names: dict[str, str]
    embedding: str | None = None
    prefix: str | None = None
    ignored: tuple[str, ...] = ()
    maps: str | None = None
    nested: str | None = None
    layers_field: tuple[str, ...] = ()
    names_inputs: bool = False
    sees_normed: bool = True
    carries_normed: bool = False
    state_first: bool = False
    masks_first: bool = False


_EAGLE3 = DraftFormat(
    title="EAGLE-3",
    kind="eagle3",
    layer="midlayer.",
    names={
        "fuse": "fc.weight",
        "fuse_norm": "input_norm.weight",
        "state_norm": "midlayer.hidden_norm.weight",
        "norm": "norm.weight",
        "head": "lm_head.weight",
    },
    embedding="embed_tokens.weight",
    ignored=("t2d",),
    maps="d2t",
    layers_field=("eagle_config", "eagle_aux_hidden_state_layer_ids"),
)
_SPECULATORS = msgspec.structs.replace(
    _EAGLE3,
    title="EAGLE-3 of speculators",
    layer="layers.0.",
    names=_EAGLE3.names | {"state_norm": "layers.0.hidden_norm.weight"},
    nested="transformer_layer_config",
    layers_field=("eagle_aux_hidden_state_layer_ids",),
    names_inputs=True,
)
_DEEPSEEK = DraftFormat(
    title="MTP in DeepSeek's naming",
    kind="mtp",
    layer="model.layers.{num_layers}.",
    names={
        "embedding_norm": "model.layers.{num_layers}.enorm.weight",
        "state_norm": "model.layers.{num_layers}.hnorm.weight",
        "join": "model.layers.{num_layers}.eh_proj.weight",
        "norm": "model.layers.{num_layers}.shared_head.norm.weight",
    },
    carries_normed=True,
    ignored=("model.layers.{num_layers}.embed_tokens.weight", "model.layers.{num_layers}.shared_head.head.weight"),
)
# Heads have an index too. Ours see all tokens: drafts need not be exact.
_INDEXED = msgspec.structs.replace(
    _DEEPSEEK,
    ignored=(
        *_DEEPSEEK.ignored,
        *(
            f"model.layers.{{num_layers}}.self_attn.indexer.{name}"
            for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
        ),
    ),
)
_MIMO = DraftFormat(
    title="MTP of MiMo",
    kind="mtp",
    layer="model.mtp_layers.0.",
    names={
        "embedding_norm": "model.mtp_layers.0.token_layernorm.weight",
        "state_norm": "model.mtp_layers.0.hidden_layernorm.weight",
        "join": "model.mtp_layers.0.input_proj.weight",
        "norm": "model.mtp_layers.0.final_layernorm.weight",
    },
    sees_normed=False,
    carries_normed=True,
    state_first=True,
    masks_first=True,
)

_STATES = DraftFormat(
    title="MTP of Qwen3.5",
    kind="mtp",
    prefix="mtp.",
    layer="mtp.layers.0.",
    names={
        "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
        "state_norm": "mtp.pre_fc_norm_hidden.weight",
        "join": "mtp.fc.weight",
        "norm": "mtp.norm.weight",
    },
    carries_normed=True,
)
_STREAMS = DraftFormat(title="MTP of DeepSeek-V4", kind="mtp", layer="mtp.0.", names={})

# Supported heads, by their architecture in config.json.
EAGLE3_FORMATS = {
    "LlamaForCausalLM": _EAGLE3,  # of its authors
    "LlamaForCausalLMEagle3": _EAGLE3,  # of SpecForge
    "Eagle3Speculator": _SPECULATORS,
    "Eagle3DraftModel": _SPECULATORS,
}
# An MTP head's architecture is its model's, with this suffix if it has its own folder.
MTP_SUFFIX = "NextN"


def mtp_format(architecture: str) -> DraftFormat:
    """Returns the format of the MTP heads of an architecture."""
    if FAMILIES[architecture].has_states:
        return _STATES
    if FAMILIES[architecture].has_index:
        return _INDEXED
    return {"MiMoForCausalLM": _MIMO, "DeepseekV4ForCausalLM": _STREAMS}.get(architecture, _DEEPSEEK)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A head's own settings."""

    format: DraftFormat  # of its checkpoint
    target_layers: int  # layers of its model
    target_hidden_size: int  # width of its model
    num_states: int  # states of the model that it takes per token, concatenated
    vocab_size: int  # tokens that it can draft
    is_in_model: bool = False  # its tensors are in the model's files
    has_embedding: bool = False
    # EAGLE-3's residual stream begins with the normed state; otherwise with the state.
    norm_before_residual: bool = False
    norm_before_fuse: bool = False  # EAGLE-3 norms the states before it fuses them

    def named(self, name: str) -> str:
        """Returns a name as it is in the checkpoint."""
        return name.replace("{num_layers}", str(self.target_layers))

    @property
    def ignored(self) -> frozenset[str]:
        """Tensors of the checkpoint that are not read."""
        return frozenset(map(self.named, self.format.ignored))

    def table(
        self, model: ModelConfig, naming: ExpertNaming = ExpertNaming.EACH
    ) -> dict[str, tuple[TensorSource, ...]]:
        """Returns every parameter and the checkpoint tensors stacked in it. ``model.vocab_size`` is the target's."""
        if model.compressed is not None:
            return stream_head_table(model, self.format.layer)
        hidden, seen = model.hidden_size, self.num_states * self.target_hidden_size
        shapes: dict[str, tuple[int, ...]] = {"state_norm": (hidden,), "norm": (hidden,)}
        if self.format.kind == "eagle3":
            shapes |= {"fuse": (hidden, seen), "head": (self.vocab_size, hidden)}
            shapes |= {"fuse_norm": (seen,)} if self.norm_before_fuse else {}
        else:
            shapes |= {"embedding_norm": (hidden,), "join": (hidden, 2 * hidden)}
        table = {name: stack((self.named(self.format.names[name]), shape)) for name, shape in shapes.items()}
        if self.has_embedding and self.format.embedding is not None:
            table["embedding"] = stack((self.format.embedding, (model.vocab_size, hidden)))
        width = 2 * hidden if self.format.kind == "eagle3" else hidden
        return table | layer_table(model, 0, self.named(self.format.layer), width=width, naming=naming)


class EagleFields(msgspec.Struct):
    """``eagle_config``."""

    eagle_aux_hidden_state_layer_ids: tuple[Count, ...] | None = None
    use_aux_hidden_state: bool | None = None


class HeadFields(msgspec.Struct):
    """Fields of a head's ``config.json`` besides its layer's shape."""

    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    eagle_aux_hidden_state_layer_ids: tuple[Count, ...] | None = None
    eagle_config: EagleFields | None = None
    num_nextn_predict_layers: Count | None = None
    bias: bool | None = None
    fc_norm: Any = None
    use_aux_norm: bool | None = None
    norm_output: Any = None


def has_experts_behind(model: ModelConfig) -> bool:
    """Whether the layer behind the last, which MTP is, has experts."""
    return model.experts is not None and model.experts.is_in(model.num_layers)


def one_layer(model: ModelConfig) -> ModelConfig:
    """Returns the shape of a head's layer."""
    if model.compressed is not None and model.experts is not None and isinstance(model.experts.routing, RootRouting):
        routing = msgspec.structs.replace(model.experts.routing, hash_layers=frozenset())
        return msgspec.structs.replace(
            model,
            num_layers=1,
            windows=model.windows[:1],
            local_layers=frozenset({0}),
            local_rope=model.local_rope,
            compressed=msgspec.structs.replace(model.compressed, kinds=(LayerKind.WINDOW,)),
            experts=msgspec.structs.replace(model.experts, routing=routing),
            num_mtp_layers=0,
        )
    keeps = model.latent is not None or model.delta is not None
    experts = model.experts if keeps and has_experts_behind(model) else None
    if experts is not None:
        experts = msgspec.structs.replace(experts, step=1, dense_layers=frozenset())
    return msgspec.structs.replace(
        model,
        num_layers=1,
        windows=(),
        has_sinks=False,
        local_rope=None,
        local_layers=frozenset(),
        experts=experts,
        delta=None,
        index=None,
        num_mtp_layers=0,
    )
