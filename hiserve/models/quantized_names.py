"""Which parameters stay in fewer bits, and the memory that these take; without torch."""

from __future__ import annotations

from collections.abc import Mapping

from hiserve.core.packed_experts import PackedSize
from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.models.names import TensorSource
from hiserve.models.quantize import BLOCK, MADE, spec_for

Table = Mapping[str, tuple[TensorSource, ...]]

# Ends of the names of parameters of layers that are inputs of ``Linear`` as they are stored: others are cut or reordered.
_LINEARS = frozenset({"qkv", "out", "gate_up", "down"})
_WEIGHT = ".weight"
# Ends of the names of scales of inputs, keys and values: inputs are scaled token by token here, keys and values are not.
_UNREAD = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
_SCALE, _READ_SCALE = ".weight_scale", ".weight_scale_inv"


def read_name(source: str, quantization: Quantization | None) -> str | None:
    """Returns the name by which a tensor of a checkpoint is read: one for all formats in 8 bits; None if it is not read."""
    if quantization is None:
        return source
    if source.endswith(_UNREAD):
        return None
    spec = quantization.linears
    has_eight_bits = spec is not None and spec.bits == 8
    return source.removesuffix(_SCALE) + _READ_SCALE if has_eight_bits and source.endswith(_SCALE) else source


def kept_specs(table: Table, quantization: Quantization | None) -> dict[str, QuantSpec]:
    """Returns the parameters of a decoder that stay quantized, as far as config.json tells, and how.

    Of the others weights in fewer bits are spelled out when they are read: of embedding and output head, of latent and
    gated attention, of states and of experts.
    """
    kept: dict[str, QuantSpec] = {}
    spec = None if quantization is None else quantization.linears
    if quantization is None or spec is None:
        return kept
    for name, pieces in table.items():
        layer, _, last = name.rpartition(".")
        if last not in _LINEARS or not layer or len(pieces[0].shape) != 2:
            continue
        if quantization.method == MADE:
            its = spec_for(spec, pieces[0].shape[1])
            if its is not None:
                kept[name] = its
            continue
        has_blocks = spec.bits == 8 and spec.group[1] > 0
        is_cut = has_blocks and any(piece.start % BLOCK for piece in pieces)
        # No checkpoint has weights whose last group is cut; those that are drawn are whole then.
        is_cut |= spec.bits == 4 and pieces[0].shape[1] % spec.group[1] > 0
        if not is_cut and not any(quantization.is_ignored(piece.source.removesuffix(_WEIGHT)) for piece in pieces):
            kept[name] = spec
    return kept


def kept_size(table: Table, quantization: Quantization | None) -> PackedSize:
    """Returns the size of the parameters that stay quantized."""
    num_params, num_bytes = 0, 0
    for name, spec in kept_specs(table, quantization).items():
        rows, columns = sum(piece.num_rows for piece in table[name]), table[name][0].shape[1]
        num_params += rows * columns
        num_bytes += spec.num_bytes(rows, columns)
    return PackedSize(num_params, num_bytes)
