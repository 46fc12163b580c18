"""Reads the shape of a mixture of experts, without torch."""

from __future__ import annotations

import msgspec

from hiserve.core.packed_experts import PackedSize, packed_bytes, stays_packed
from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields

_SPARSE, _DENSE = "sparse", "dense"
_HASHED, _CHOSEN = "hash_moe", "moe"


class GroupRouting(msgspec.Struct, frozen=True, kw_only=True):
    """Likelihoods of experts are sigmoids; a learned bias takes part in the choice alone (DeepSeek-V3, arXiv:2412.19437).

    A group counts as much as its two best experts; only experts of the best groups can be chosen.
    """

    num_groups: int  # groups of as many adjacent experts
    num_chosen: int  # groups of a token
    scale: float  # factor of the shares


class RootRouting(msgspec.Struct, frozen=True, kw_only=True):
    """Likelihoods of experts are roots of softplus; a learned bias takes part in the choice alone (DeepSeek-V4).

    Layers that hash take the experts that a table names for each token of the vocabulary; their shares are learned.
    """

    scale: float  # factor of the shares
    hash_layers: frozenset[int]  # layers, counted from 0, that hash


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of the MLP."""

    num_experts: int  # experts of a layer
    num_per_token: int  # experts that compute a token
    intermediate_size: int  # width of each
    is_normalized: bool  # the shares of a token's experts are scaled to sum to 1
    step: int  # every ``step``-th layer has experts, counted from 1
    dense_layers: frozenset[int]  # layers, counted from 0, that have an MLP regardless of ``step``
    routing: GroupRouting | RootRouting | None = None  # None: likelihoods are a softmax
    has_bias: bool = False  # the router and both products of an expert have biases
    has_shared_gate: bool = False  # the output of the shared expert is multiplied by the sigmoid of a gate of the token
    shared_size: int = 0  # width of the shared expert, an MLP that computes every token; 0 without

    @property
    def joins_shared(self) -> bool:
        """Whether the shared expert can be part of the products of the others."""
        return 0 < self.shared_size == self.intermediate_size

    def is_in(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return (layer + 1) % self.step == 0 and layer not in self.dense_layers

    def hashes(self, layer: int) -> bool:
        """Whether a table chooses the experts of a layer, counted from 0, by the tokens themselves."""
        return isinstance(self.routing, RootRouting) and layer in self.routing.hash_layers

    def num_layers(self, total: int) -> int:
        """Returns how many of ``total`` layers have experts."""
        dense = [layer for layer in self.dense_layers if 0 <= layer < total and (layer + 1) % self.step == 0]
        return total // self.step - len(dense)

    def num_params(self, hidden_size: int) -> int:
        """Returns the parameters of a layer's experts and their router."""
        expert = 3 * hidden_size * self.intermediate_size + hidden_size  # with its row of the router
        expert += 2 * self.intermediate_size + hidden_size + 1 if self.has_bias else 0
        biases = 0 if self.routing is None else self.num_experts
        biases += hidden_size if self.has_shared_gate else 0
        return self.num_experts * expert + biases + 3 * hidden_size * self.shared_size

    def hash_params(self, vocab_size: int) -> int:
        """Returns the entries of all tables by which experts are chosen, less the biases in whose place they are."""
        if not isinstance(self.routing, RootRouting):
            return 0
        return len(self.routing.hash_layers) * (vocab_size * self.num_per_token - self.num_experts)

    def step_elements(self, hidden_size: int) -> int:
        """Returns elements of a token in the experts of a layer, outputs included."""
        mixed = self.num_per_token * (self.intermediate_size + hidden_size) + 4 * self.num_experts
        return mixed + (3 * self.shared_size + hidden_size if self.shared_size else 0)


def packed_specs(experts: ExpertsConfig, quantization: Quantization | None, hidden_size: int) -> dict[str, QuantSpec]:
    """Returns the parameters of a layer that stay packed where products upcast them, by name, and how they are stored."""
    spec = None if quantization is None else quantization.experts
    if quantization is None or spec is None or not stays_packed(spec, hidden_size, experts.intermediate_size):
        return {}
    found, dense = {"experts_gate_up": spec, "experts_down": spec}, quantization.linears
    if dense is not None and dense.kind == "e4m3" and experts.joins_shared and stays_packed(dense):
        found |= {"shared_gate_up": dense, "shared_down": dense}
    return found


def packed_size(
    experts: ExpertsConfig | None, quantization: Quantization | None, hidden_size: int, num_layers: int
) -> PackedSize:
    """Returns the size of all parameters of a model's layers that stay packed where products upcast them."""
    if experts is None:
        return PackedSize()
    num_params, num_bytes = 0, 0
    for name, spec in packed_specs(experts, quantization, hidden_size).items():
        count = experts.num_experts if name.startswith("experts") else 1
        rows, columns, num_parts = hidden_size, experts.intermediate_size, 1
        if name.endswith("gate_up"):
            rows, columns, num_parts = 2 * experts.intermediate_size, hidden_size, 2
        num_params += count * rows * columns
        num_bytes += count * packed_bytes(spec, rows, columns, num_parts)
    layers = experts.num_layers(num_layers)
    return PackedSize(num_params=layers * num_params, num_bytes=layers * num_bytes)


def read_experts(fields: ConfigFields, *, has_groups: bool, has_bias: bool) -> ExpertsConfig | None:
    """Returns the experts that ``config.json`` describes, or None; ``has_groups`` and ``has_bias`` are the family's.

    Raises:
        ModelError: They are of a kind that is not supported, or contradict themselves.
    """
    if not fields.num_experts or fields.num_experts_per_tok is None:
        return None
    inner = fields.moe_intermediate_size or fields.intermediate_size
    experts = ExpertsConfig(
        num_experts=fields.num_experts,
        num_per_token=fields.num_experts_per_tok,
        intermediate_size=inner,
        is_normalized=bool(fields.norm_topk_prob),
        step=fields.decoder_sparse_step or 1,
        dense_layers=_dense_layers(fields),
        routing=_read_routing(fields) if has_groups else None,
        has_bias=has_bias,
        has_shared_gate=bool(fields.shared_expert_intermediate_size),
        shared_size=fields.shared_expert_intermediate_size or inner * (fields.n_shared_experts or 0),
    )
    return experts if experts.num_layers(fields.num_hidden_layers) else None


def read_hashed_experts(fields: ConfigFields) -> ExpertsConfig:
    """Returns the experts of a model whose first layers choose them by a table; all its layers have experts.

    Raises:
        ModelError: They are of a kind that is not supported, or contradict themselves.
    """
    types = fields.mlp_layer_types or []
    if unknown := sorted(set(types) - {_HASHED, _CHOSEN}):
        raise ModelError(
            f"mlp_layer_types names {', '.join(unknown)}; only {_HASHED} and {_CHOSEN} are supported.", param="model"
        )
    refused = {
        f"scoring_func {fields.scoring_func}": fields.scoring_func not in (None, "sqrtsoftplus"),
        f"topk_method {fields.topk_method}": fields.topk_method not in (None, "noaux_tc"),
        "norm_topk_prob false": fields.norm_topk_prob is False,
        f"{fields.n_shared_experts} shared experts": fields.n_shared_experts not in (None, 1),
    }
    if named := [name for name, is_so in refused.items() if is_so]:
        raise ModelError(
            f"experts with {', '.join(named)} are not supported; scoring_func sqrtsoftplus, topk_method noaux_tc, norm_topk_prob "
            "true and one shared expert are.",
            param="model",
        )
    inner = fields.moe_intermediate_size or fields.intermediate_size
    if len(types) != fields.num_hidden_layers or not fields.num_experts or fields.num_experts_per_tok is None:
        raise ModelError(
            f"config.json makes no sense: {fields.num_experts} experts, {fields.num_experts_per_tok} of each token, and "
            f"mlp_layer_types of {len(types)} layers, of {fields.num_hidden_layers}.",
            param="model",
        )
    return ExpertsConfig(
        num_experts=fields.num_experts,
        num_per_token=fields.num_experts_per_tok,
        intermediate_size=inner,
        is_normalized=True,
        step=1,
        dense_layers=frozenset(),
        routing=RootRouting(
            scale=1.0 if fields.routed_scaling_factor is None else fields.routed_scaling_factor,
            hash_layers=frozenset(layer for layer, kind in enumerate(types) if kind == _HASHED),
        ),
        shared_size=inner,
    )


def _dense_layers(fields: ConfigFields) -> frozenset[int]:
    types = fields.mlp_layer_types
    if types is None:
        return frozenset({*(fields.mlp_only_layers or ()), *range(fields.first_k_dense_replace or 0)})
    if unknown := sorted(set(types) - {_SPARSE, _DENSE}):
        raise ModelError(
            f"mlp_layer_types names {', '.join(unknown)}; only {_SPARSE} and {_DENSE} are supported.", param="model"
        )
    if len(types) != fields.num_hidden_layers:
        raise ModelError(
            f"config.json makes no sense: mlp_layer_types names {len(types)} layers, and num_hidden_layers is "
            f"{fields.num_hidden_layers}.",
            param="model",
        )
    return frozenset(layer for layer, kind in enumerate(types) if kind == _DENSE)


def _read_routing(fields: ConfigFields) -> GroupRouting:
    routing = GroupRouting(
        num_groups=fields.n_group or 1,
        num_chosen=fields.topk_group or 1,
        scale=1.0 if fields.routed_scaling_factor is None else fields.routed_scaling_factor,
    )
    refused = {
        f"scoring_func {fields.scoring_func}": fields.scoring_func not in (None, "sigmoid"),
        f"topk_method {fields.topk_method}": fields.topk_method not in (None, "noaux_tc"),
        f"moe_layer_freq {fields.moe_layer_freq}": fields.moe_layer_freq not in (None, 1),
    }
    if named := [name for name, is_so in refused.items() if is_so]:
        raise ModelError(
            f"experts with {', '.join(named)} are not supported; scoring_func sigmoid, topk_method noaux_tc and "
            "moe_layer_freq 1 are.",
            param="model",
        )
    count, groups, chosen = fields.num_experts or 0, routing.num_groups, routing.num_chosen
    nonsense = {
        f"{count} experts do not divide into {groups} groups of two or more": count % groups or count < 2 * groups,
        f"topk_group {chosen} is more than n_group {groups}": chosen > groups,
        f"{fields.num_experts_per_tok} experts per token are more than {chosen} of {groups} groups have": (
            (fields.num_experts_per_tok or 0) > chosen * (count // groups)
        ),
    }
    for fact, is_so in nonsense.items():
        if is_so:
            raise ModelError(f"config.json makes no sense: {fact}.", param="model")
    return routing
