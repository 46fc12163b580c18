"""The shape of a draft head's one layer, by its model's."""

from __future__ import annotations

import msgspec

from hiserve.models.compressed_config import LayerKind
from hiserve.models.experts_config import RootRouting
from hiserve.models.model_config import ModelConfig


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
