"""Weights that stay in 8 or 4 bits on the device: read as they are stored, or made of those in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.errors import ModelError
from hiserve.kernels.quantized import QuantizedWeight, dequantize, join_halves, pack_codes, quantize
from hiserve.models.block_scales import SCALE_SUFFIX, check_values
from hiserve.models.checkpoint import StoredTensor
from hiserve.models.four_bits import FourBits, Parts, packed_weights, unpack_weight
from hiserve.models.names import TensorSource
from hiserve.models.quantize import MADE
from hiserve.models.shard_weights import cut_quantized, cut_whole
from hiserve.models.staging import stage

Kept = Mapping[str, tuple[tuple[TensorSource, ...], QuantSpec]]
_NAN = 127  # code of E4M3, but for the sign
_Staged = dict[str, dict[str, Tensor]]  # the parts of each tensor of a parameter


def read_kept(
    held: Mapping[str, StoredTensor],
    kept: Kept,
    quantization: Quantization,
    device: torch.device,
    *,
    param: str,
) -> dict[str, QuantizedWeight]:
    """Reads parameters that stay quantized.

    Args:
        held: The tensors of the checkpoint, by name, which have been checked.
        kept: The tensors that are stacked in each parameter, of which a rank keeps a part, and how it is quantized.
        quantization: Of the model.
        device: Of the weights.
        param: The setting that names the checkpoint.

    Raises:
        ModelError: Scales or groups make no sense.
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    packed, wanted = packed_weights(held, quantization), {}
    for name, (pieces, _) in kept.items():
        wanted[name] = {each.source: _parts(held, packed, each.source, quantization) for each in pieces}
    made = {}
    for name, staged in _stage(wanted, device):
        spec = kept[name][1]
        if quantization.method == MADE:
            _refuse_infinite(staged, param)
            whole = quantize(torch.cat([parts["values"] for parts in staged.values()]), spec)
        elif spec.bits == 8:
            whole = _join_eight_bits(staged, spec, param)
        else:
            unpacked = {source: _unpacked(parts, source, quantization, param) for source, parts in staged.items()}
            whole = _join_four_bits(unpacked, spec, param)
        made[name] = cut_quantized(whole, kept[name][0], param=param)
    return made


def spell_out(
    held: Mapping[str, StoredTensor],
    targets: Sequence[tuple[TensorSource, Tensor]],
    quantization: Quantization,
    device: torch.device,
    *,
    param: str,
) -> None:
    """Reads weights in 4 bits, each whole, into parts of parameters of a floating type; other arguments as for ``read_kept``."""
    packed, spec = packed_weights(held, quantization), quantization.linears
    assert spec is not None or not targets
    parts_of = {piece.source: (piece, part) for piece, part in targets}
    wanted = {source: {source: packed[source]} for source in parts_of}
    for source, staged in _stage(wanted, device):
        assert spec is not None
        one = {source: _unpacked(staged[source], source, quantization, param)}
        piece, part = parts_of[source]
        part.copy_(cut_whole(dequantize(_join_four_bits(one, spec, param), part.dtype), (piece,)))


def _parts(
    held: Mapping[str, StoredTensor], packed: Mapping[str, Parts], source: str, quantization: Quantization
) -> Parts:
    if source in packed:
        return packed[source]
    if quantization.method == MADE:
        return {"values": held[source]}
    return {"codes": held[source], "scales": held[source + SCALE_SUFFIX]}


def _stage(wanted: Mapping[str, Mapping[str, Parts]], device: torch.device) -> Iterator[tuple[str, _Staged]]:
    """Yields each parameter with the parts of its tensors as they are stored, on the device."""
    parts_of = {
        name: {(source, part): tensor for source, parts in sources.items() for part, tensor in parts.items()}
        for name, sources in wanted.items()
    }
    for name, tensors in stage(parts_of, device):
        staged: _Staged = {}
        for (source, part), tensor in tensors.items():
            staged.setdefault(source, {})[part] = tensor
        yield name, staged


def _unpacked(parts: Mapping[str, Tensor], source: str, quantization: Quantization, param: str) -> FourBits:
    check_values({f"of the scales of {source}": parts["scales"]}, param)
    return unpack_weight(parts, source, quantization, param=param)


def _refuse_infinite(staged: _Staged, param: str) -> None:
    for source, parts in staged.items():
        if not bool(parts["values"].isfinite().all()):
            raise ModelError(
                f"tensor {source} has NaN or infinity among its weights, which --quantize cannot round. Fetch the checkpoint again, "
                "or leave --quantize out.",
                param=param,
            )


def _join_eight_bits(staged: _Staged, spec: QuantSpec, param: str) -> QuantizedWeight:
    """Stacks rows. A scale for a whole tensor becomes one for each of its rows."""
    codes, scales = [], []
    for source, parts in staged.items():
        check_values({source + SCALE_SUFFIX: parts["scales"]}, param)
        if bool((parts["codes"].view(torch.uint8) & _NAN == _NAN).any()):  # kernels would read another number
            raise ModelError(f"tensor {source} has NaN among its weights. Fetch the checkpoint again.", param=param)
        codes.append(parts["codes"])
        scale = parts["scales"].float()
        if spec.group[1]:
            scales.append(scale)
        else:
            scales.append(scale.flatten().expand(codes[-1].shape[0]))
    joined = join_halves(torch.cat(codes))
    return QuantizedWeight(spec, (joined.shape[0], joined.shape[1]), joined, torch.cat(scales))


def _join_four_bits(unpacked: Mapping[str, FourBits], spec: QuantSpec, param: str) -> QuantizedWeight:
    """Stacks rows.

    Raises:
        ModelError: Their columns are in different orders.
    """
    (first_name, first), *others = unpacked.items()
    for name, each in others:
        orders = [order for order in (first.order, each.order) if order is not None]
        if len(orders) == 1 or (orders and not torch.equal(*orders)):
            raise ModelError(
                f"the inputs of {first_name} and {name} are sorted in different orders (g_idx), and these weights are multiplied "
                "together. Give a checkpoint without act-order.",
                param=param,
            )
    weights = unpacked.values()
    codes = torch.cat([each.codes for each in weights])
    zeros = [each.zeros for each in weights if each.zeros is not None]
    return QuantizedWeight(
        spec,
        (codes.shape[0], codes.shape[1]),
        pack_codes(codes, spec),
        torch.cat([each.scales for each in weights], 1),
        torch.cat(zeros, 1) if zeros else None,
        first.order,
    )
