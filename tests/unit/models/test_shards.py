"""Shares of models: what each rank reads, and which models have none."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from hiserve.config.options import make_options
from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.distributed.shard import Shard
from hiserve.errors import ConfigError, ModelError
from hiserve.kernels.quantized import QuantizedWeight, dequantize
from hiserve.models.builtin_shapes import read_model, shape_config
from hiserve.models.draft_config import find_draft, model_facts
from hiserve.models.model_config import find_model, read_model_config
from hiserve.models.names import Cut, TensorSource
from hiserve.models.shard_weights import cut_quantized
from hiserve.models.shards import local_config, refuse_unshardable
from hiserve.models.weights import load_head_parameters, load_parameters
from tests.helpers.block_scaled import quantize as quantize_by_blocks
from tests.helpers.compressed_models import HEAVY, SPARSE, save_compressed
from tests.helpers.latent_models import save_latent
from tests.helpers.models import save_family, save_llama
from tests.helpers.packed_models import pack_gpt_oss
from tests.helpers.quantized import quantize_checkpoint

CPU = torch.device("cpu")


def whole_and_shares(
    folder: Path, load_format: str, size: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    config = read_model_config(folder)
    parts = [
        load_parameters(folder, config, torch.float32, CPU, load_format, Shard(rank, size)) for rank in range(size)
    ]
    return load_parameters(folder, config, torch.float32, CPU, load_format), parts


def sections(whole: torch.Tensor, *rows: int) -> list[torch.Tensor]:
    return list(torch.split(whole, rows))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_heads_its_columns_and_its_tokens(tmp_path: Path, load_format: str, size: int) -> None:
    """Of 4 heads of 16 elements, 2 of keys and values, an MLP of 96 and 320 tokens; all projections have biases."""
    save_llama(tmp_path, attention_bias=True, mlp_bias=True)
    whole, shares = whole_and_shares(tmp_path, load_format, size)
    queries, keys, values = sections(whole["layers.1.qkv"], 64, 32, 32)
    gate, up = sections(whole["layers.1.gate_up"], 96, 96)
    tokens = 192 if size == 2 else 128
    for rank, share in enumerate(shares):
        q, kv = slice(rank * 64 // size, (rank + 1) * 64 // size), 16 * (rank * 2 // size)
        inner = slice(rank * 96 // size, (rank + 1) * 96 // size)
        assert torch.equal(share["layers.1.qkv"], torch.cat((queries[q], keys[kv : kv + 16], values[kv : kv + 16])))
        assert torch.equal(share["layers.1.out"], whole["layers.1.out"][:, q])
        assert torch.equal(share["layers.1.gate_up"], torch.cat((gate[inner], up[inner])))
        assert torch.equal(share["layers.1.down"], whole["layers.1.down"][:, inner])
        assert torch.equal(
            share["layers.1.gate_up_bias"], whole["layers.1.gate_up_bias"].view(2, -1)[:, inner].flatten()
        )
        assert ("layers.1.out_bias" in share, "layers.1.down_bias" in share) == (rank == 0, rank == 0)
        for name in ("embedding", "head"):
            assert torch.equal(share[name], whole[name][rank * tokens : (rank + 1) * tokens])
        assert torch.equal(share["layers.1.mlp_norm"], whole["layers.1.mlp_norm"])


def test_experts_are_cut_inside_and_every_rank_has_the_router(tmp_path: Path) -> None:
    save_family("mixtral", tmp_path)
    whole, shares = whole_and_shares(tmp_path, "auto", 2)
    for rank, share in enumerate(shares):
        gate_up = whole["layers.0.experts_gate_up"].view(6, 2, 2, 48, 64)[:, :, rank]
        assert torch.equal(share["layers.0.experts_gate_up"], gate_up.flatten(0, 2))
        assert torch.equal(
            share["layers.0.experts_down"], whole["layers.0.experts_down"][:, 48 * rank : 48 * (rank + 1)]
        )
        assert torch.equal(share["layers.0.router"], whole["layers.0.router"])


@pytest.mark.parametrize("stored", ["auto", "dummy", "packed"])
def test_all_experts_in_one_tensor_are_cut_inside(tmp_path: Path, stored: str) -> None:
    """Of gpt-oss: matrices transposed or in groups of 4-bit numbers, gate and up rows in turn; the sinks of a rank's heads."""
    save_family("gpt_oss", tmp_path, intermediate_size=128)
    if stored == "packed":
        pack_gpt_oss(tmp_path)
    whole, shares = whole_and_shares(tmp_path, "dummy" if stored == "dummy" else "auto", 2)
    for rank, share in enumerate(shares):
        inner = slice(64 * rank, 64 * (rank + 1))
        gate_up, bias = (whole["layers.1.experts_gate_up" + name] for name in ("", "_bias"))
        assert torch.equal(share["layers.1.experts_gate_up"], gate_up.view(6, 2, 128, 64)[:, :, inner].flatten(0, 2))
        assert torch.equal(share["layers.1.experts_gate_up_bias"], bias.view(6, 2, 128)[:, :, inner].flatten(1))
        assert torch.equal(share["layers.1.experts_down"], whole["layers.1.experts_down"][:, inner])
        assert ("layers.1.experts_down_bias" in share) == (rank == 0)
        assert torch.equal(share["layers.1.sinks"], whole["layers.1.sinks"][2 * rank : 2 * rank + 2])


def test_plain_experts_in_one_tensor_are_cut_inside(tmp_path: Path) -> None:
    """Gates of an expert, then ups: each rank has what it has of a tensor for each expert and projection."""
    save_family("qwen3_moe", tmp_path)
    _, apart = whole_and_shares(tmp_path, "auto", 2)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in (0, 2):
        experts = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}{expert}.{name}_proj.weight") for expert in range(6)])
            for name in ("gate", "up", "down")
        )
        tensors |= {experts + "gate_up_proj": torch.cat((gate, up), 1), experts + "down_proj": down}
    save_file(tensors, path)
    _, together = whole_and_shares(tmp_path, "auto", 2)
    for mine, its in zip(together, apart, strict=True):
        for name in ("layers.0.experts_gate_up", "layers.2.experts_down"):
            assert torch.equal(mine[name], its[name])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("query_rank", [24, None])
def test_heads_of_latents_are_shared_out(tmp_path: Path, query_rank: int | None, load_format: str) -> None:
    """Of 4 heads with keys of 24 elements, of which 8 are rotated, and values of 12; latents are whole, and so are gates of experts."""
    save_latent("deepseek_v3", tmp_path, q_lora_rank=query_rank)
    whole, shares = whole_and_shares(tmp_path, load_format, 2)
    for rank, share in enumerate(shares):
        queries, rest = sections(whole["layers.1.latents"], *((24, 40) if query_rank else (96, 40)))
        if query_rank is None:
            queries = queries[48 * rank : 48 * (rank + 1)]
        else:
            assert torch.equal(share["layers.1.query_up"], whole["layers.1.query_up"][48 * rank : 48 * (rank + 1)])
        assert torch.equal(share["layers.1.latents"], torch.cat((queries, rest)))
        assert torch.equal(share["layers.1.latent_up"], whole["layers.1.latent_up"][56 * rank : 56 * (rank + 1)])
        assert torch.equal(share["layers.1.out"], whole["layers.1.out"][:, 24 * rank : 24 * (rank + 1)])
        inner = slice(20 * rank, 20 * (rank + 1))
        gate_up = whole["layers.1.shared_gate_up"].view(2, 40, 64)[:, inner].flatten(0, 1)
        assert torch.equal(share["layers.1.shared_gate_up"], gate_up)
        assert torch.equal(share["layers.1.shared_down"], whole["layers.1.shared_down"][:, inner])
        assert torch.equal(share["layers.1.router"], whole["layers.1.router"])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_heads_that_share_one_row_are_shared_out_by_groups(tmp_path: Path, load_format: str) -> None:
    """Of 4 heads of 32 elements in 2 groups of outputs of 16; queries of the index, which lie behind these, are whole, and so are streams."""
    save_compressed(tmp_path, num_hidden_layers=2, layer_types=[SPARSE, HEAVY], mlp_layer_types=["hash_moe", "moe"])
    whole, shares = whole_and_shares(tmp_path, load_format, 2)
    for rank, share in enumerate(shares):
        for layer, of_index in ((0, [256]), (1, [])):
            queries, *rest = sections(whole[f"layers.{layer}.query_up"], 128, *of_index)
            assert torch.equal(share[f"layers.{layer}.query_up"], torch.cat((queries.chunk(2)[rank], *rest)))
        for name in ("sinks", "out_groups"):
            assert torch.equal(share["layers.0." + name], whole["layers.0." + name].chunk(2)[rank])
        assert torch.equal(share["layers.0.out"], whole["layers.0.out"].chunk(2, 1)[rank])
        for name in ("into", "attn_mix", "mlp_mix_base", "index_position_bias", "expert_table", "router"):
            assert torch.equal(share["layers.0." + name], whole["layers.0." + name])
        assert torch.equal(share["layers.1.shared_down"], whole["layers.1.shared_down"].chunk(2, 1)[rank])


def test_heads_of_latents_in_8_bits_may_end_within_a_block(tmp_path: Path) -> None:
    """They are spelled out: the second rank's begin at row 160 of queries, and at 272 of keys and values, whose blocks have 128."""
    save_latent(
        "deepseek_v3", tmp_path, qk_nope_head_dim=72, v_head_dim=64, intermediate_size=256, moe_intermediate_size=256
    )
    quantize_by_blocks(tmp_path, torch.bfloat16)
    whole, shares = whole_and_shares(tmp_path, "auto", 2)
    for rank, share in enumerate(shares):
        for name, rows in (("query_up", 160), ("latent_up", 272)):
            assert torch.equal(share["layers.1." + name], whole["layers.1." + name][rows * rank : rows * (rank + 1)])
        inner = slice(128 * rank, 128 * (rank + 1))  # of experts that are spelled out on a CPU
        assert torch.equal(share["layers.1.experts_down"], whole["layers.1.experts_down"][..., inner])


@pytest.mark.parametrize(("family", "stored"), [("qwen3_5_text", "fp8"), ("qwen3_next", "dummy")])
def test_heads_of_states_are_shared_out(tmp_path: Path, family: str, stored: str) -> None:
    """Of 2 heads of queries and keys, with values of two or three heads each; and attention whose heads have their query before their gate."""
    save_family(family, tmp_path)
    if stored == "fp8":
        quantize_checkpoint(tmp_path, "channel", lambda source: "in_proj_qkv" in source)
    config = read_model_config(tmp_path)
    whole, shares = whole_and_shares(tmp_path, "dummy" if stored == "dummy" else "auto", 2)
    delta = config.delta
    assert delta is not None and delta.num_key_heads == 2
    keys, values, heads = delta.num_key_heads * delta.key_dim, delta.value_size, delta.num_value_heads
    for rank, share in enumerate(shares):
        sizes = {"delta_conv": (keys, keys, values), "decay_rate": (heads,), "decay_bias": (heads,)}
        rows = (keys, keys, values, heads, heads, values)
        sizes |= (
            {"delta_qkvz": (sum(rows[:3]) + values,), "delta_ba": (2 * heads,)}
            if delta.is_interleaved
            else {"delta_in": rows}
        )
        for name, parts in sizes.items():
            expected = [part.chunk(2)[rank] for part in sections(whole["layers.0." + name], *parts)]
            assert torch.equal(share["layers.0." + name], torch.cat(expected)), name
        assert torch.equal(share["layers.0.out"], whole["layers.0.out"].chunk(2, 1)[rank])
        assert torch.equal(share["layers.0.delta_gain"], whole["layers.0.delta_gain"])
        full = f"layers.{max(set(range(config.num_layers)) - delta.layers)}."
        assert torch.equal(share[full + "query_gate"], whole[full + "query_gate"].chunk(2)[rank])
        key_value = whole[full + "key_value"].view(2, 2, config.num_kv_heads // 2 * config.head_dim, -1)[:, rank]
        assert torch.equal(share[full + "key_value"], key_value.flatten(0, 1))
        assert torch.equal(share[full + "q_norm"], whole[full + "q_norm"])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_draft_heads_are_cut_like_layers(kind: str) -> None:
    folder = find_model("hiserve-nano")
    draft = find_draft(kind, None, folder, read_model_config(folder))  # type: ignore[arg-type]
    whole, share = (
        load_head_parameters(draft, torch.float32, CPU, "auto", shard)[0] for shard in (Shard(), Shard(1, 2))
    )
    for name in ("layers.0.out", "layers.0.down"):
        assert torch.equal(share[name], whole[name][:, whole[name].shape[1] // 2 :])
    for name in ("state_norm", "fuse" if kind == "eagle3" else "join"):
        assert torch.equal(share[name], whole[name])
    if kind == "eagle3":
        assert torch.equal(share["head"], whole["head"][share["head"].shape[0] :])


def test_a_file_that_was_cut_short_is_reported_for_columns_too(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config, path = read_model_config(tmp_path), tmp_path / "model.safetensors"
    whole = path.read_bytes()
    load_parameters(tmp_path, config, torch.float32, CPU, "auto", Shard(1, 2))
    path.write_bytes(whole[:-64])
    with pytest.raises(ModelError):
        load_parameters(tmp_path, config, torch.float32, CPU, "auto", Shard(1, 2))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "deepseek_v4", "qwen3_5_moe_text"])
def test_facts_of_a_share_are_those_of_its_parameters(tmp_path: Path, family: str) -> None:
    """Pages hold a rank's keys and values, or whole latents and rows."""
    saves = {"llama": save_llama, "deepseek_v3": partial(save_latent, family), "deepseek_v4": save_compressed}
    saves.get(family, partial(save_family, family))(tmp_path)
    config = read_model_config(tmp_path)
    facts = model_facts(make_options(tp=2, spec="off"), tmp_path, config)
    first = load_parameters(tmp_path, config, torch.float32, CPU, "auto", Shard(0, 2))
    assert facts.num_params == sum(each.numel() for each in first.values())
    assert facts.slot_elements == config.slot_elements // (1 if family.startswith("deepseek") else 2)


@pytest.mark.parametrize(
    ("shape", "size", "fact"),
    [
        ("gpt-oss-20b-mxfp4", 4, "MLPs of width 2880 and 2880, in groups of 32. Use one of 1, 2."),
        ("v3-like", 3, "128 heads"),
        ("qwen3.5-35b-a3b", 3, "16 of keys of states"),
        (
            "v4-flash-like",
            16,
            "64 heads in 8 groups, 1 of keys and values, and MLPs of width 2048 and 2048. Use one of 1, 2, 4, 8.",
        ),
        ("llama-8b", 3, "Use one of 1, 2, 4, 8, 16, 32."),
        ("llama-8b", 64, "32 heads"),
        ("v4-flash-like-fp4", 3, "in groups of 128. Use one of 1, 2, 4, 8."),
    ],
)
def test_what_a_group_cannot_compute_is_refused_by_name(shape: str, size: int, fact: str) -> None:
    config = shape_config(shape)
    refuse_unshardable(config, 1)
    with pytest.raises(ConfigError, match=fact) as caught:
        refuse_unshardable(config, size)
    assert caught.value.param == "tp"


def test_no_rank_has_a_part_of_a_block_or_of_a_column_of_the_shared_expert() -> None:
    blocks = Quantization("fp8", QuantSpec(8, "e4m3", (128, 128)), None)
    model = msgspec.structs.replace(shape_config("llama-8b"), head_dim=64, quantization=blocks)
    refuse_unshardable(model, 4)
    with pytest.raises(ConfigError, match=r"8 of keys and values.* in groups of 128\. Use one of 1, 2, 4\."):
        refuse_unshardable(model, 8)  # each has a key head of 64 elements
    with pytest.raises(ConfigError, match=r"Use one of 1\."):
        refuse_unshardable(msgspec.structs.replace(model, intermediate_size=14400), 2)
    model = shape_config("v4-flash-like-fp4")
    assert model.experts is not None
    experts = msgspec.structs.replace(model.experts, intermediate_size=512, shared_size=512)
    with pytest.raises(ConfigError, match=r"in groups of 128\. Use one of 1, 2, 4\."):
        refuse_unshardable(msgspec.structs.replace(model, experts=experts), 8)  # the shared expert is in 8 bits
    assert model.compressed is not None
    compressed = msgspec.structs.replace(model.compressed, out_rank=64)
    with pytest.raises(ConfigError, match=r"Use one of 1, 2, 4\."):
        refuse_unshardable(msgspec.structs.replace(model, compressed=compressed), 8)  # whose out has 64 columns
    model = shape_config("v3-like")
    assert model.experts is not None
    experts = msgspec.structs.replace(model.experts, shared_size=2044)
    with pytest.raises(ConfigError, match="Use one of 1, 2, 4"):
        refuse_unshardable(msgspec.structs.replace(model, experts=experts), 8)
    model = msgspec.structs.replace(
        model, quantization=msgspec.structs.replace(blocks, linears=None, experts=blocks.linears)
    )
    refuse_unshardable(model, 16)  # experts of 2048
    with pytest.raises(ConfigError, match=r"in groups of 128\. Use one of 1, 2, 4, 8, 16\."):
        refuse_unshardable(model, 32)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("gpt-oss-20b", 4),
        ("gpt-oss-20b-mxfp4", 2),
        ("gemma-3-27b", 8),
        ("v3-like", 8),
        ("qwen3.5-35b-a3b", 4),
        ("v4-flash-like", 8),
        ("v4-flash-like-fp4", 8),
    ],
)
def test_models_with_windows_latents_states_or_compressed_rows_are_computed_by_groups(shape: str, size: int) -> None:
    refuse_unshardable(shape_config(shape), size)


def test_a_share_of_a_group_of_one_is_the_model() -> None:
    config = shape_config("llama-8b")
    assert local_config(config, Shard()) is config
    assert local_config(config, Shard(3, 16)).num_kv_heads == 1


def check_share(whole: dict[str, Any], share: dict[str, Any], rank: int) -> None:
    """Checks one of two ranks, of a model with 4 heads of 64 elements, 4 of keys and values, and an MLP of 256."""
    for name in ("qkv", "out", "gate_up", "down"):
        parameter, its = whole[f"layers.1.{name}"], share[f"layers.1.{name}"]
        assert isinstance(its, QuantizedWeight)
        assert its.num_bytes <= parameter.num_bytes / 2 + 2 * its.shape[0]  # of columns all rows have scales
        values = dequantize(parameter, torch.float64)
        parts = (
            values.chunk(2, 1)
            if name in ("out", "down")
            else values.unflatten(0, (-1, 2, 128)).transpose(0, 1).flatten(1, 2)
        )
        assert torch.equal(dequantize(its, torch.float64), parts[rank]), name


@pytest.mark.parametrize("name", ["fp8", "channel", "blocks", "int", "awq"])
def test_quantized_weights_are_cut_with_their_scales(tmp_path: Path, name: str) -> None:
    """A share has the values of the whole, in its share of the memory: scales of all, of rows, of blocks of 128, of groups of 32, and zero points."""
    save_llama(tmp_path, hidden_size=128, head_dim=64, num_key_value_heads=4, intermediate_size=256)
    if name == "blocks":
        quantize_by_blocks(tmp_path, torch.float32)
    else:
        quantize_checkpoint(tmp_path, name)
    whole, shares = whole_and_shares(tmp_path, "auto", 2)
    refuse_unshardable(read_model_config(tmp_path), 2)
    for rank, share in enumerate(shares):
        check_share(whole, share, rank)


@pytest.mark.parametrize(("scheme", "load_format"), [("fp8", "dummy"), ("int4", "auto")])
def test_weights_that_become_quantized_have_the_scales_of_the_whole(
    tmp_path: Path, scheme: str, load_format: str
) -> None:
    save_llama(tmp_path, hidden_size=128, head_dim=64, num_key_value_heads=4, intermediate_size=256)
    settings = make_options(model=str(tmp_path), quantize=scheme)
    _, config = read_model(settings.model)
    whole, *shares = (
        load_parameters(tmp_path, config, torch.float32, CPU, load_format, shard)
        for shard in (Shard(), Shard(0, 2), Shard(1, 2))
    )
    for rank, share in enumerate(shares):
        check_share(whole, share, rank)


def test_columns_in_the_order_of_their_groups_are_not_cut(tmp_path: Path) -> None:
    save_llama(tmp_path, hidden_size=128, head_dim=64, num_key_value_heads=4, intermediate_size=256)
    quantize_checkpoint(tmp_path, "uint")
    with pytest.raises(ModelError, match="without act-order"):
        load_parameters(tmp_path, read_model_config(tmp_path), torch.float32, CPU, "auto", Shard(1, 2))
    weight = load_parameters(tmp_path, read_model_config(tmp_path), torch.float32, CPU, "auto")["layers.1.qkv"]
    rows = [TensorSource(name, (256, 128), 256 * place, cut=Cut(0, 128, 256)) for place, name in enumerate("qkv")]
    assert weight.order is not None
    values = dequantize(
        cut_quantized(weight, tuple(rows), param="model"), torch.float64
    )  # rows are, as the order is theirs too
    assert torch.equal(values, dequantize(weight, torch.float64).view(3, 256, 128)[:, 128:].flatten(0, 1))


def test_experts_in_4_bits_are_spelled_out_and_cut(tmp_path: Path) -> None:
    """Their inputs are sorted by group, which no part of them is; projections stay quantized, and are cut by columns alone where these are not."""
    save_family("qwen3_moe", tmp_path, moe_intermediate_size=64)
    quantize_checkpoint(tmp_path, "uint", lambda source: ".experts." in source)
    whole, shares = whole_and_shares(tmp_path, "auto", 2)
    for rank, share in enumerate(shares):
        inner = slice(32 * rank, 32 * (rank + 1))
        gate_up = whole["layers.0.experts_gate_up"].view(6, 2, 64, -1)[:, :, inner].flatten(0, 2)
        assert torch.equal(share["layers.0.experts_gate_up"], gate_up)
        assert torch.equal(share["layers.0.experts_down"], whole["layers.0.experts_down"][:, inner])


def test_quantized_weights_that_are_spelled_out_are_cut_too(tmp_path: Path) -> None:
    """An output head, which stays in 16 bits."""
    save_llama(tmp_path, hidden_size=128, head_dim=64, num_key_value_heads=4, intermediate_size=256)
    quantize_checkpoint(tmp_path, "channel", lambda source: source.endswith("_proj.weight") or "lm_head" in source)
    whole, shares = whole_and_shares(tmp_path, "auto", 2)
    assert torch.equal(torch.cat([share["head"] for share in shares]), whole["head"])


def test_packed_rows_that_are_spelled_out_are_cut_too(tmp_path: Path) -> None:
    """Two values a byte: a rank's part of the bytes is not that of their number."""
    save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(8)
    for name in ("up", "down"):
        source = f"model.layers.1.mlp.{name}_proj.weight"
        rows, columns = tensors[source].shape
        codes = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
        scales = torch.randint(118, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {source: codes, source + "_scale_inv": scales.view(torch.float8_e8m0fnu)}
    save_file(tensors, path)
    whole, shares = whole_and_shares(tmp_path, "auto", 2)
    for rank, share in enumerate(shares):
        inner = slice(48 * rank, 48 * (rank + 1))
        gate_up = whole["layers.1.gate_up"].view(2, 96, 64)[:, inner].flatten(0, 1)
        assert torch.equal(share["layers.1.gate_up"], gate_up)
        assert torch.equal(share["layers.1.down"], whole["layers.1.down"][:, inner])
