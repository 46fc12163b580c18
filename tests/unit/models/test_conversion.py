"""Packed and interleaved experts of gpt-oss against decoding byte by byte, and their refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hiserve.core.activation import Activation
from hiserve.errors import ModelError
from hiserve.models import conversion, staging
from hiserve.models.conversion import mxfp4_pairs, unpack_mxfp4
from hiserve.models.model_config import read_model_config
from hiserve.models.weights import held_tensors, load_parameters
from tests.helpers.checkpoint_folder import folder
from tests.helpers.models import load_transformers, save_family

CPU = torch.device("cpu")
GPT_OSS: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "rope_parameters": None}


def value(code: int) -> float:
    """A 4-bit float: one sign, two exponent bits, one of the mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if code & 8 else size


def every_byte() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(1, 16, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_byte_under_every_scale_is_exact(dtype: torch.dtype) -> None:
    pairs = mxfp4_pairs(dtype)
    for scale in range(253):
        found = unpack_mxfp4(every_byte(), torch.full((1, 16), scale, dtype=torch.uint8), pairs)
        assert found.shape == (1, 512) and found.dtype == dtype
        expected = [math.ldexp(value(code), scale - 127) for byte in range(256) for code in (byte & 15, byte >> 4)]
        assert found.double().flatten().tolist() == expected, scale
    assert unpack_mxfp4(every_byte(), torch.full((1, 16), 255, dtype=torch.uint8), pairs).isnan().all()


def test_transformers_unpacks_the_same() -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 250, (3, 8, 4), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = [unpack_mxfp4(*each, mxfp4_pairs(torch.bfloat16)).T for each in zip(blocks, scales, strict=True)]
    assert torch.equal(torch.stack(ours), theirs)


def test_gates_come_before_ups_and_matrices_are_not_transposed(tmp_path: Path) -> None:
    place = save_family("gpt_oss", tmp_path)
    stored = load_file(place / "model.safetensors")
    found = load_parameters(place, read_model_config(place), torch.float32, CPU, "auto")
    theirs, biases = (stored[f"model.layers.1.mlp.experts.gate_up_proj{kind}"] for kind in ("", "_bias"))
    gate_up = found["layers.1.experts_gate_up"].view(6, 2, 96, 64)
    bias = found["layers.1.experts_gate_up_bias"].view(6, 2, 96)
    for expert, row in ((0, 0), (3, 50), (5, 95)):
        for half in (0, 1):
            assert torch.equal(gate_up[expert, half, row], theirs[expert, :, 2 * row + half])
            assert bias[expert, half, row] == biases[expert, 2 * row + half]
    down = found["layers.1.experts_down"].view(6, 64, 96)
    assert torch.equal(down, stored["model.layers.1.mlp.experts.down_proj"].mT)


def test_little_memory_for_stored_tensors_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = save_family("gpt_oss", tmp_path)
    config = read_model_config(place)
    expected = load_parameters(place, config, torch.float32, CPU, "auto")
    reads = []
    read = staging.read_chunks
    monkeypatch.setattr(staging, "read_chunks", lambda *given: (reads.append(1), read(*given)))
    monkeypatch.setattr(staging, "MAX_STAGED_BYTES", 1)
    held = held_tensors(place, param="model")
    from hiserve.models.names import ExpertNaming, parameter_table

    table = parameter_table(config, ExpertNaming.TRANSPOSED)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    conversion.read_converted(held, table, found, CPU)
    assert len(reads) == 9  # both matrices of each layer, and the bias that is interleaved
    assert all(torch.equal(found[name], expected[name]) for name in table if table[name][0].is_converted)


def test_what_a_gpt_oss_file_leaves_out_is_what_transformers_fills_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    found = read_model_config(tmp_path)
    assert (found.vocab_size, found.hidden_size, found.num_layers) == (201_088, 2880, 36)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (64, 8, 64)
    assert found.windows == tuple(128 if each == "sliding_attention" else None for each in theirs.layer_types)
    assert found.activation == Activation(slope=1.702, shift=1.0, limit=7.0)
    assert found.experts is not None and found.has_sinks and found.has_qkv_bias and found.has_out_bias
    assert (found.experts.num_experts, found.experts.num_per_token, found.experts.has_bias) == (128, 4, True)
    assert (found.rope.kind, found.rope.theta, found.rope.factor) == ("yarn", 150_000.0, 32.0)
    assert (found.rope.truncate, found.rope.original_context, found.context_length) == (False, 4096, 131_072)
    assert found.dtype == "bfloat16" and 115e9 < found.num_params < 118e9


def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    place = save_family("gpt_oss", tmp_path)
    oracle = load_transformers(place, torch.float32)
    assert read_model_config(place).num_params == sum(parameter.numel() for parameter in oracle.parameters())


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        ("GptOssForCausalLM", {"quant_method": "bitsandbytes"}),
        ("LlamaForCausalLM", {"quant_method": "mxfp4"}),
        ("LlamaForCausalLM", 3),
    ],
)
def test_a_quantization_that_is_not_supported_is_named(tmp_path: Path, architecture: str, given: Any) -> None:
    with pytest.raises(ModelError, match="quantization_config") as refused:
        read_model_config(folder(tmp_path, **GPT_OSS | {"architectures": [architecture], "quantization_config": given}))
    method = str(given["quant_method"] if isinstance(given, dict) else given)
    assert method in refused.value.message and "mxfp4 (GptOssForCausalLM)" in refused.value.message


def test_a_packed_tensor_of_another_type_is_named(tmp_path: Path) -> None:
    place = save_family("gpt_oss", tmp_path)
    stored = load_file(place / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for expert in [key for key in stored if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = stored.pop(expert).shape
        stored[expert + "_blocks"] = torch.zeros(count, rows, columns // 32, 16, dtype=torch.uint8)
        stored[expert + "_scales"] = torch.zeros(count, rows, columns // 32, dtype=torch.uint8)
    save_file(stored | {name + "_scales": stored[name + "_scales"].float()}, place / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name}_scales holds F32, and bytes"):
        load_parameters(place, read_model_config(place), torch.float32, CPU, "auto")
    save_file(stored | {"model.norm.weight": torch.ones(64, dtype=torch.uint8)}, place / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds U8, and floating-point"):
        load_parameters(place, read_model_config(place), torch.float32, CPU, "auto")
