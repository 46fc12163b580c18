"""Checkpoints with weights in 8 and 4 bits, packed number by number, and what these stand for."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.kernels.quantized import QuantizedWeight, dequantize
from tests.helpers.dialogues import held_out_prompts

FILE = "model.safetensors"
GROUP = 32
MOST_LOSS = {"fp8": 1.005, "int4": 1.03}  # of hiserve-nano, times that of whole weights
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of eight neighbours, its place in a number of 32 bits


class Format(NamedTuple):
    """A format of checkpoints.

    Attributes:
        config: Its ``quantization_config``.
        bits: Of a weight.
        group: For 8 bits 0 and 1, one scale for a tensor or for each row.
        zeros: Weights have zero points.
        sorts: Inputs are sorted by group.
    """

    config: dict[str, Any]
    bits: int = 4
    group: int = GROUP
    zeros: bool = False
    sorts: bool = False


def _compressed(weights: dict[str, Any], style: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"config_groups": {"group_0": scheme}, "format": style, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **groups}


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "lm_head": False}
FORMATS = {
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "static"}, 8, 0),
    "modelopt": Format({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, 8, 0),
    "channel": Format(
        _compressed(_FLOAT | {"strategy": "channel"}, "float-quantized", {"num_bits": 8, "type": "float"}), 8, 1
    ),
    "int": Format(_compressed(_INT | {"symmetric": True}, "pack-quantized")),
    "uint": Format(_compressed(_INT | {"symmetric": False}, "pack-quantized"), zeros=True, sorts=True),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}, zeros=True),
    "gptq": Format(_GPTQ | {"sym": True, "desc_act": False}),
    "gptq_v2": Format(_GPTQ | {"sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"}, zeros=True, sorts=True),
}


def values_of(parameter: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the values of a parameter."""
    return dequantize(parameter, dtype) if isinstance(parameter, QuantizedWeight) else parameter


def held_out_losses(count: int, device: str) -> dict[str, float]:
    """Returns the mean loss of tokens of held-out text, in nats, of hiserve-nano with each value of ``--quantize``."""
    prompts = held_out_prompts("coffee", "services", "pytask", "python")[::-1][:count]
    scored = SamplingParams(temperature=0.0, seed=0, max_tokens=1, prompt_logprobs=0)
    settings: dict[str, Any] = {"spec": "off", "host_cache_gib": 0, "kv_pages": 512, "log_level": "warning"}
    losses = {}
    for scheme in ("off", "fp8", "int4"):
        with LLM(in_process=True, device=device, quantize=scheme, cpu_threads=1, **settings) as llm:
            results = llm.generate(prompts, scored)
        scores = [each.logprob for result in results for each in (result.prompt_logprobs or ())[1:] if each is not None]
        losses[scheme] = -statistics.fmean(scores)
    return losses


def quantize_checkpoint(
    folder: Path, name: str, is_quantized: Callable[[str], bool] = lambda source: source.endswith("_proj.weight")
) -> dict[str, Tensor]:
    """Quantizes weights of a checkpoint in one of ``FORMATS``, by default the projections of its layers.

    Returns:
        The tensors of the checkpoint with float64 values of those that are quantized.
    """
    form, generator = FORMATS[name], torch.Generator().manual_seed(3)
    tensors = load_file(folder / FILE)
    plain = dict(tensors)
    for source in [each for each in tensors if is_quantized(each)]:
        module, weight = source.removesuffix(".weight"), tensors.pop(source)
        made, plain[source] = _eight(weight, form) if form.bits == 8 else _four(weight, name, form, generator)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in made.items()}
    save_file(tensors, folder / FILE)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form.config}))
    return plain


def _eight(weight: Tensor, form: Format) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.abs().amax(1, keepdim=True) if form.group else weight.abs().max()
    scale = largest / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    made = {"weight": codes, "weight_scale": scale}
    if form.config.get("activation_scheme") == "static":
        made["input_scale"] = torch.ones(())
    return made, codes.double() * scale.double()


def _four(weight: Tensor, name: str, form: Format, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Draws zero points and groups; values are wherever these put them, about as large as before."""
    rows, columns = weight.shape
    groups = columns // GROUP
    zeros = torch.full((rows, groups), 8)
    if form.zeros:
        zeros = torch.randint(1, 16, (rows, groups), generator=generator)
    of_column = torch.arange(columns) // GROUP
    if form.sorts:  # the same for all weights of so many inputs
        of_column = of_column[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).half() * (weight.std() / 6).half()
    codes = (weight / scales[:, of_column].float() + zeros[:, of_column]).round().clamp(0, 15).long()
    values = (codes - zeros[:, of_column]).double() * scales[:, of_column].double()
    return packed(codes, scales, zeros, of_column, name, form), values


def packed(
    codes: Tensor, scales: Tensor, zeros: Tensor, of_column: Tensor, name: str, form: Format
) -> dict[str, Tensor]:
    """Returns the tensors of a weight in 4 bits by the last part of their names, in one of ``FORMATS``."""
    if name in ("int", "uint"):
        made = {"weight_packed": numbers(codes), "weight_scale": scales}
        made |= {"weight_shape": torch.tensor(codes.shape)}
        if form.sorts:
            made["weight_g_idx"] = of_column.int()
        return made | ({"weight_zero_point": numbers(zeros.T).T} if form.zeros else {})
    if name == "awq":
        return {
            "qweight": numbers(codes.T, AWQ_PLACES),
            "qzeros": numbers(zeros.T, AWQ_PLACES),
            "scales": scales.T,
        }
    stored = zeros - 1 if name == "gptq" else zeros
    made = {"qweight": numbers(codes.T.contiguous().T).T, "qzeros": numbers(stored.T), "scales": scales.T}
    return made | {"g_idx": of_column.int()}


def numbers(values: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs eight neighbours of a row into a number of 32 bits, each at its place from the lowest bits on."""
    rows = []
    for row in values.tolist():
        packed = [
            sum(value << 4 * place for value, place in zip(row[first : first + 8], places, strict=True))
            for first in range(0, len(row), 8)
        ]
        rows.append([number - (1 << 32) if number >> 31 else number for number in packed])
    return torch.tensor(rows, dtype=torch.int32)
