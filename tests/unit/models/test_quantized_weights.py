"""Checkpoints in 8 and 4 bits: every value bit for bit, the memory that they take, and every way to be incomplete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.cache.storage.cache_identity import shape_digest
from hiserve.config.options import make_options
from hiserve.core.quantization import QuantSpec
from hiserve.core.resolve import resolve
from hiserve.errors import ConfigError, ModelError
from hiserve.kernels.quantized import QuantizedWeight, dequantize, quantize
from hiserve.models import staging
from hiserve.models.builtin_shapes import read_model
from hiserve.models.compressed_names import table_of
from hiserve.models.draft_config import model_facts
from hiserve.models.model_config import read_model_config
from hiserve.models.quantized_names import kept_specs
from hiserve.models.weights import load_parameters
from tests.helpers.model_facts import LAPTOP
from tests.helpers.models import save_llama, save_qwen3
from tests.helpers.quantized import FILE, FORMATS, packed, quantize_checkpoint, values_of

CPU = torch.device("cpu")
KEPT = {
    "qkv": ("self_attn", "qkv"),
    "gate_up": ("mlp", ("gate", "up")),
    "out": ("self_attn", "o"),
    "down": ("mlp", ("down",)),
}


# Numbers of 8 x 8 codes, (7 row + 3 column + row column) mod 16, as libraries of the formats made them: compressed-tensors 0.20.1
# (``pack_to_int32``), and AutoAWQ 0.2.7 (``unpack_awq``, ``reverse_awq_order``; ``pack_exllama``, whose layout is that of GPTQ).
_ROWS = (1392285232, 1068974007, 477288510, -113413707, -688383428, -1280068685, -1870767046, 2100950449)
_AWQ_COLUMNS = (324512992, -1145359565, 1394592390, -76328487, -1814566868, 993755007, -744552766, 2079563029)
OF_LIBRARIES = {
    "int": (_ROWS, None),
    "uint": (_ROWS, -1796649324),
    "awq": (_AWQ_COLUMNS, -1639364124),
    "gptq": (_ROWS, 2004318071),
    "gptq_v2": (_ROWS, -1796649324),
}


def load(folder: Path, dtype: torch.dtype = torch.float64, load_format: str = "auto") -> dict[str, Any]:
    return load_parameters(folder, read_model_config(folder), dtype, CPU, load_format)


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_tests_pack_weights_as_the_libraries_of_their_formats_do(name: str) -> None:
    """With a zero point of (5 row + 3) mod 15 + 1 for each row, or 8."""
    row, column = torch.arange(8)[:, None], torch.arange(8)
    zeros = (5 * row + 3) % 15 + 1 if FORMATS[name].zeros else torch.full((8, 1), 8)
    made = packed((7 * row + 3 * column + row * column) % 16, torch.ones(8, 1), zeros, column // 8, name, FORMATS[name])
    numbers = [each.flatten().tolist() for part, each in made.items() if part in ("weight_packed", "qweight")]
    numbers_of_zeros = [each.tolist() for part, each in made.items() if part in ("weight_zero_point", "qzeros")]
    words, word = OF_LIBRARIES[name]
    assert numbers == [list(words)] and numbers_of_zeros == ([] if word is None else [[[word]]])


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_of_a_format_is_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"hidden_size": 128} if FORMATS[name].bits == 8 else {}  # halves of 128 columns are interleaved
    plain = quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=2, **wide), name)
    monkeypatch.setattr(staging, "MAX_STAGED_BYTES", 20_000)  # one, or some
    found = load(tmp_path)
    for layer in range(2):
        for ours, (block, names) in KEPT.items():
            stacked = torch.cat([plain[f"model.layers.{layer}.{block}.{each}_proj.weight"] for each in names])
            parameter = found[f"layers.{layer}.{ours}"]
            assert isinstance(parameter, QuantizedWeight) and parameter.spec.bits == FORMATS[name].bits
            assert torch.equal(values_of(parameter, torch.float64), stacked.double())
    assert torch.equal(found["head"], plain["lm_head.weight"].double())


def test_weights_that_a_file_of_modelopt_alone_tells_of_stay_in_8_bits(tmp_path: Path) -> None:
    plain = quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=1, hidden_size=128), "modelopt")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.with_name("hf_quant_config.json").write_text(json.dumps({"quantization": fields.pop("quantization_config")}))
    path.write_text(json.dumps(fields))
    found = load(tmp_path)["layers.0.out"]
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(values_of(found, torch.float64), plain["model.layers.0.self_attn.o_proj.weight"].double())


@pytest.mark.parametrize("name", ["fp8", "channel", "gptq_v2"])
def test_what_cannot_stay_quantized_is_spelled_out(tmp_path: Path, name: str) -> None:
    """One of three projections that are multiplied together is whole; the output head is quantized."""

    def is_quantized(source: str) -> bool:
        return source == "lm_head.weight" or (source.endswith("_proj.weight") and "k_proj" not in source)

    plain = quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=1), name, is_quantized)
    found = load(tmp_path)
    stacked = torch.cat([plain[f"model.layers.0.self_attn.{each}_proj.weight"].double() for each in "qkv"])
    assert isinstance(found["layers.0.out"], QuantizedWeight)
    assert torch.equal(found["layers.0.qkv"], stacked) and torch.equal(found["head"], plain["lm_head.weight"])


def test_zero_points_in_the_middle_change_nothing(tmp_path: Path) -> None:
    quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=1), "int")
    plain = values_of(load(tmp_path)["layers.0.out"], torch.float64)
    for middle in (torch.full((8, 2), -0x77777778, dtype=torch.int32), torch.zeros(64, 2, dtype=torch.int8)):
        edit(tmp_path, lambda tensors, middle=middle: tensors.update({f"{OUT}.weight_zero_point": middle}))
        assert torch.equal(values_of(load(tmp_path)["layers.0.out"], torch.float64), plain)


def test_the_memory_plan_counts_the_bytes_that_weights_take(tmp_path: Path) -> None:
    for name, shape in (
        ("channel", {}),
        ("uint", {}),
        ("gptq", {}),
        (None, {"quantize": "fp8"}),
        (None, {"quantize": "int4"}),
    ):
        folder = save_qwen3(tmp_path / f"{name} {shape}", hidden_size=128, intermediate_size=160)
        if name is not None:
            quantize_checkpoint(folder, name)
        options = make_options(model=str(folder), dtype="bfloat16", **shape)
        config = read_model(options.model)[1]
        facts = model_facts(options, folder, config)
        for load_format in ("auto", "dummy"):
            found = load_parameters(folder, config, torch.bfloat16, CPU, load_format)
            kept = [each for each in found.values() if isinstance(each, QuantizedWeight)]
            assert len(kept) == 4 * config.num_layers
            assert facts.quantized_linears.num_params == sum(each.shape[0] * each.shape[1] for each in kept)
            order = sum(each.order.nbytes for each in kept if each.order is not None)
            least = sum(each.num_bytes for each in kept) - order
            assert 0 <= facts.quantized_linears.num_bytes - least <= (least // 8 if load_format == "dummy" else 0), (
                name,
                shape,
            )
            others = sum(each.nbytes for each in found.values() if isinstance(each, Tensor))
            assert (facts.num_params - facts.quantized_linears.num_params) * 2 == others
            parts = resolve(options, facts, LAPTOP).memory.parts
            assert parts["weights"] == others + facts.quantized_linears.num_bytes


@pytest.mark.parametrize(("scheme", "most"), [("fp8", 0.04), ("int4", 0.12)])
def test_weights_are_rounded_when_they_are_loaded(tmp_path: Path, scheme: str, most: float) -> None:
    """As large as the whole weights, up to the rounding; a row of zeros stays one, and the identity differs."""
    save_llama(tmp_path, num_hidden_layers=1, hidden_size=128, head_dim=64)
    key = "model.layers.0.mlp.down_proj.weight"
    edit(tmp_path, lambda tensors: tensors[key][3].zero_())
    whole, plain = read_model(make_options(model=str(tmp_path)).model)[1], load(tmp_path)
    config = read_model(make_options(model=str(tmp_path), quantize=scheme).model)[1]
    found = load_parameters(tmp_path, config, torch.float32, CPU, "auto")
    for name in KEPT:
        ours, theirs = found[f"layers.0.{name}"], plain[f"layers.0.{name}"]
        assert isinstance(ours, QuantizedWeight)
        assert ours.spec.group == ((1, 0) if scheme == "fp8" else (1, 32 if name == "down" else 128))
        error = (values_of(ours, torch.float64) - theirs).norm() / theirs.norm()
        assert 0 < error < most, (name, error)
    assert not values_of(found["layers.0.down"], torch.float32)[3].any()
    assert shape_digest(config, None, 64) != shape_digest(whole, None, 64)


def test_the_memory_plan_counts_modules_that_are_left_as_they_are(tmp_path: Path) -> None:
    """By what config.json says of them, and blocks that begin within a block of 128 as whole."""
    quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=2), "channel")
    path, sizes = tmp_path / "config.json", []
    for ignored, block in ((["lm_head"], False), (["lm_head", "re:.*[kq]_proj"], False), (["lm_head"], True)):
        fields = json.loads(path.read_text())
        fields["quantization_config"]["ignore"] = ignored
        weights = fields["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights |= {"strategy": "block", "block_structure": [128, 128]} if block else {}
        path.write_text(json.dumps(fields))
        options = make_options(model=str(tmp_path))
        kept = kept_specs(table_of(read_model(options.model)[1]), read_model(options.model)[1].quantization)
        sizes.append(sorted({name.rpartition(".")[2] for name in kept}))
    assert sizes == [["down", "gate_up", "out", "qkv"], ["down", "gate_up", "out"], ["down", "out"]]


def test_weights_that_are_quantized_are_not_quantized_again(tmp_path: Path) -> None:
    quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=1), "awq")
    with pytest.raises(ConfigError, match=r"--quantize is fp8, but .* are quantized already, by awq") as refused:
        read_model(make_options(model=str(tmp_path), quantize="fp8").model)
    assert refused.value.param == "quantize"


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_weights_that_only_their_files_say_are_quantized_are_not_quantized_again(tmp_path: Path, scheme: str) -> None:
    save_llama(tmp_path, num_hidden_layers=1)
    key = "model.layers.0.mlp.up_proj.weight"
    scales = {f"{key}_scale_inv": torch.ones(1, 1)}
    edit(tmp_path, lambda tensors: tensors.update({key: tensors[key].to(torch.float8_e4m3fn)} | scales))
    config = read_model(make_options(model=str(tmp_path), quantize=scheme).model)[1]
    with pytest.raises(ModelError, match=rf"{key} holds F8_E4M3, and --quantize rounds") as refused:
        load_parameters(tmp_path, config, torch.float32, CPU, "auto")
    assert refused.value.param == "quantize"


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_weights_that_are_not_finite_are_not_rounded(tmp_path: Path, scheme: str) -> None:
    save_llama(tmp_path, num_hidden_layers=1)
    edit(tmp_path, lambda tensors: tensors[f"{OUT}.weight"][3, 3].fill_(torch.inf if scheme == "fp8" else torch.nan))
    config = read_model(make_options(model=str(tmp_path), quantize=scheme).model)[1]
    with pytest.raises(ModelError, match=rf"{OUT}\.weight has NaN or infinity among .* --quantize cannot round"):
        load_parameters(tmp_path, config, torch.float32, CPU, "auto")


def test_the_least_numbers_are_rounded_to_0() -> None:
    least = torch.full((8, 32), 1e-44)
    least[:, 1] = 0.0
    for each in QuantSpec(8, "e4m3", (1, 0)), QuantSpec(4, "int", (1, 32)):
        assert not dequantize(quantize(least, each), torch.float32).any()


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


OUT = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("name", "change", "fact"),
    [
        ("awq", lambda tensors: tensors.pop(f"{OUT}.scales"), rf"lacks {OUT}\.scales"),
        ("uint", lambda tensors: tensors.pop(f"{OUT}.weight_zero_point"), rf"lacks {OUT}\.weight_zero_point"),
        ("int", lambda tensors: tensors.pop(f"{OUT}.weight_packed"), rf"lacks {OUT}\.weight_packed"),
        ("channel", lambda tensors: tensors.pop(f"{OUT}.weight_scale"), rf"lacks its scales, {OUT}\.weight_scale"),
        (
            "channel",
            lambda tensors: tensors.update({f"{OUT}.weight_scale": torch.ones(2, 1)}),
            rf"{OUT}\.weight_scale_inv holds F32 \[2, 1\]; .* \[64, 1\] is wanted, one scale for each row",
        ),
        (
            "fp8",
            lambda tensors: tensors.update({f"{OUT}.weight_scale": torch.ones(64)}),
            r"holds F32 \[64\]; .* \[\] is wanted, one scale",
        ),
        (
            "gptq",
            lambda tensors: tensors.update({f"{OUT}.qweight": torch.ones(8, 32, dtype=torch.int32)}),
            rf"{OUT}\.qweight holds I32 \[8, 32\]; I32 \[8, 64\] is wanted",
        ),
        (
            "gptq",
            lambda tensors: tensors.update({f"{OUT}.qzeros": torch.ones(2, 8, dtype=torch.int32)}),
            rf"{OUT}\.weight has zero points other than 8",
        ),
        (
            "gptq_v2",
            lambda tensors: tensors.update({f"{OUT}.g_idx": torch.zeros(64, dtype=torch.int32)}),
            rf"the groups of {OUT}\.weight do not have 32 inputs each",
        ),
        (
            "gptq_v2",
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.up_proj.g_idx": torch.arange(64, dtype=torch.int32).flip(0) // 32}
            ),
            r"gate_proj\.weight and model\.layers\.0\.mlp\.up_proj\.weight are sorted in different orders",
        ),
        (
            "gptq_v2",
            lambda tensors: tensors.update({f"{OUT}.g_idx": torch.zeros(5, dtype=torch.int32)}),
            rf"{OUT}\.g_idx holds I32 \[5\]; I32 or I64 \[64\] is wanted",
        ),
        (
            "int",
            lambda tensors: tensors.update({f"{OUT}.weight_zero_point": torch.ones(64, 2, dtype=torch.int8)}),
            rf"{OUT}\.weight has zero points other than 8",
        ),
        (
            "int",
            lambda tensors: tensors.update({f"{OUT}.weight_shape": torch.ones(2, dtype=torch.bool)}),
            rf"{OUT}\.weight_shape holds BOOL",
        ),
        (
            "gptq_v2",
            lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.g_idx"),
            r"gate_proj\.weight and model\.layers\.0\.mlp\.up_proj\.weight are sorted in different orders",
        ),
        (
            "channel",
            lambda tensors: tensors[f"{OUT}.weight"].view(torch.uint8)[5, 5].fill_(255),
            rf"{OUT}\.weight has NaN among",
        ),
        ("awq", lambda tensors: tensors.update({f"{OUT}.weight": torch.ones(64, 64)}), rf"{OUT}\.weight twice"),
        (
            "awq",
            lambda tensors: tensors.update(
                {
                    "lm_head.weight": torch.ones(320, 64).to(torch.float8_e4m3fn),
                    "lm_head.weight_scale_inv": torch.ones(320),
                }
            ),
            r"lm_head\.weight_scale_inv holds F32 \[320\]; .* one scale for each block",
        ),
        ("awq", lambda tensors: tensors[f"{OUT}.scales"][0, 0].zero_(), rf"{OUT}\.weight has a scale that is 0"),
        ("channel", lambda tensors: tensors[f"{OUT}.weight_scale"][0].fill_(torch.nan), r"a scale that is 0, NaN"),
        (
            "channel",
            lambda tensors: (
                tensors.update({"lm_head.weight": torch.ones(320, 64).to(torch.float8_e4m3fn)})
                or tensors.update({"lm_head.weight_scale": torch.zeros(320, 1)})
            ),
            r"lm_head\.weight_scale_inv has a scale that is 0",
        ),
    ],
)
def test_what_is_missing_or_makes_no_sense_is_named(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], object], fact: str
) -> None:
    quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=1), name)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=fact) as refused:
        load(tmp_path)
    assert refused.value.param == "model"


def test_a_group_that_does_not_divide_is_named_and_drawn_weights_are_whole_then(tmp_path: Path) -> None:
    quantize_checkpoint(save_llama(tmp_path, num_hidden_layers=1), "awq")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"group_size": 32', '"group_size": 128'))
    with pytest.raises(ModelError, match=r"q_proj\.weight .* a scale for each 128 inputs does not divide them"):
        load(tmp_path)
    assert all(isinstance(each, Tensor) for each in load(tmp_path, load_format="dummy").values())
