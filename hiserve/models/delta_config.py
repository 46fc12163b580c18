"""Reads the shape of layers with recurrent states, without torch (Gated DeltaNet, arXiv:2412.06464)."""

from __future__ import annotations

import msgspec

from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space
from hiserve.core.step_memory import DELTA_CHUNK
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields

STATE, INPUTS = "delta_state", "delta_inputs"  # names of the groups that rows carry along
_LINEAR, _FULL = "linear_attention", "full_attention"
# Fields that describe such layers, without which there are none.
_NEEDED = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


class DeltaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of the gated delta rule: each value head has a state, a matrix of ``key_dim`` by ``value_dim``.

    Queries, keys and values pass a depthwise causal convolution before the rule.
    """

    layers: frozenset[int]  # these layers, counted from 0; the others have attention
    num_key_heads: int  # of queries and keys; divides ``num_value_heads``
    num_value_heads: int
    key_dim: int  # elements of a query's or key's head
    value_dim: int  # elements of a value's head
    conv_width: int  # tokens that the convolution sees
    is_interleaved: bool  # the checkpoint has all projections of a key head beside each other (Qwen3-Next)
    state_dtype: str = "float32"  # of stored states, except with float64: those are float64

    @property
    def num_channels(self) -> int:
        """Elements of a token's queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        """Elements of a token's values."""
        return self.num_value_heads * self.value_dim

    @property
    def input_width(self) -> int:
        """Elements of a token that the ring keeps: the channels, and two gates of each value head."""
        return self.num_channels + 2 * self.num_value_heads

    def num_params(self, hidden_size: int) -> int:
        """Returns the parameters of a layer's projections, convolution, rates and norm."""
        rows = self.input_width + 2 * self.value_size  # with the gates of outputs, and the projection back
        return rows * hidden_size + self.num_channels * self.conv_width + 2 * self.num_value_heads + self.value_dim

    def step_elements(self) -> int:
        """Returns elements of a token in such a layer: projections, convolved heads, solved chunks, gates' factors, outputs."""
        projected, gates = self.input_width + self.value_size, 4 * self.num_value_heads  # of twice the bytes
        solved = self.num_value_heads * (self.key_dim + self.value_dim + DELTA_CHUNK)
        return projected + self.num_channels + gates + solved + self.value_size

    def groups(self, dtype: str, max_draft: int) -> tuple[CacheGroupSpec, CacheGroupSpec]:
        """Returns what rows carry along: states, and a ring of inputs.

        Args:
            dtype: Of the inputs.
            max_draft: Most drafts of a row in a step. So many tokens may have been computed that the state does not cover yet.
        """
        state = CacheGroupSpec(
            name=STATE,
            num_layers=len(self.layers),
            num_kv_heads=self.num_value_heads,
            head_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype if dtype == "float64" else self.state_dtype,
            codec="state",
            space=Space.ROW,
        )
        kept = self.conv_width - 1
        inputs = CacheGroupSpec(
            name=INPUTS,
            num_layers=len(self.layers),
            num_kv_heads=1,
            head_dim=self.input_width,
            dtype=dtype,
            codec="inputs",
            space=Space.ROW,
            ring=kept + max_draft,
            snapshot_rows=kept,
        )
        return state, inputs

    def cache_plan(self, kv: CacheGroupSpec, num_layers: int, max_draft: int) -> CachePlan:
        """Returns the groups of a model's layers; ``kv`` is that of the layers with attention, ``max_draft`` as for ``groups``."""
        carried = self.groups(kv.dtype, max_draft)
        layers, beside = list[tuple[str, int]](), list[tuple[tuple[str, int], ...]]()
        counts = {kv.name: 0, STATE: 0}
        for layer in range(num_layers):
            name = STATE if layer in self.layers else kv.name
            layers.append((name, counts[name]))
            beside.append(((INPUTS, counts[name]),) if name == STATE else ())
            counts[name] += 1
        return CachePlan(groups=(kv, *carried), layers=tuple(layers), beside=tuple(beside))


def read_delta(fields: ConfigFields, *, is_interleaved: bool) -> DeltaConfig:
    """Returns the layers with recurrent states that ``config.json`` describes.

    Raises:
        ModelError: A field is missing, or describes layers that are not supported.
    """
    if missing := [name for name in _NEEDED if getattr(fields, name) is None]:
        raise ModelError(
            f"config.json makes no sense: layers with recurrent states lack {', '.join(missing)}. Fetch it again.",
            param="model",
        )
    key_heads, value_heads, key_dim, value_dim, width = (getattr(fields, name) for name in _NEEDED)
    layers = frozenset(index for index, kind in enumerate(_kinds(fields)) if kind == _LINEAR)
    nonsense = {
        f"{value_heads} value heads are not a multiple of {key_heads} key heads": value_heads % key_heads,
        f"linear_conv_kernel_dim {width} is below 2": width < 2,
    }
    refused = {
        "attention_bias": fields.attention_bias,
        "no layer of full_attention": len(layers) == fields.num_hidden_layers,
        "no layer of linear_attention": not layers,
    }
    for fact, is_so in nonsense.items():
        if is_so:
            raise ModelError(f"config.json makes no sense: {fact}.", param="model")
    if named := [name for name, is_so in refused.items() if is_so]:
        raise ModelError(
            f"layers with recurrent states and {', '.join(named)} are not supported; both kinds of layers without biases are.",
            param="model",
        )
    return DeltaConfig(
        layers=layers,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=width,
        is_interleaved=is_interleaved,
    )


def _kinds(fields: ConfigFields) -> list[str]:
    """Returns the type of each layer; by default every ``full_attention_interval``-th has attention."""
    num_layers, types = fields.num_hidden_layers, fields.layer_types
    if types is None:
        interval = fields.full_attention_interval or 4
        return [_FULL if (layer + 1) % interval == 0 else _LINEAR for layer in range(num_layers)]
    if unknown := sorted(set(types) - {_LINEAR, _FULL}):
        raise ModelError(
            f"layer_types of config.json has {', '.join(unknown)}, which is not supported beside recurrent states. Supported: "
            f"{_FULL}, {_LINEAR}.",
            param="model",
        )
    if len(types) != num_layers:
        raise ModelError(
            f"config.json makes no sense: layer_types names {len(types)} layers, and num_hidden_layers is {num_layers}.",
            param="model",
        )
    return types


def read_partial_dim(fields: ConfigFields, head_dim: int) -> int:
    """Returns the elements of an attention head that are rotated: a share of them.

    Raises:
        ModelError: They are not pairs.
    """
    rope = fields.rope_parameters
    in_rope = None if rope is None else rope.partial_rotary_factor
    share = next(each for each in (in_rope, fields.partial_rotary_factor, 1.0) if each is not None)
    if not 0 < share <= 1 or int(head_dim * share) < 1 or int(head_dim * share) % 2:
        raise ModelError(
            f"config.json makes no sense: partial_rotary_factor is {share}, and pairs of a head's {head_dim} elements are wanted. "
            "Fetch it again.",
            param="model",
        )
    return int(head_dim * share)
