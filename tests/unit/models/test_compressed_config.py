"""Configurations with compressed attention: both spellings, what is refused, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.core.kv_groups import Space
from hiserve.core.step_memory import SCORE_BYTES, step_memory
from hiserve.errors import ModelError
from hiserve.models.compressed_config import LayerKind
from hiserve.models.compressed_names import compressed_name, compressed_table
from hiserve.models.experts_config import RootRouting
from hiserve.models.model_config import ModelConfig, read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.compressed_models import HEAVY, SHAPE, SPARSE, WINDOW, YARN, save_compressed

FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_hash_layers": 3,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 256,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_compressed(tmp_path_factory.mktemp("compressed"))


def parse(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_model_config(folder)


def test_released_files_name_ratios_and_numbers_of_layers(tmp_path: Path) -> None:
    config = parse(tmp_path, FLASH)
    shape, experts = config.compressed, config.experts
    assert shape is not None and experts is not None
    counts = {kind: shape.count(kind) for kind in LayerKind}
    assert counts == {LayerKind.WINDOW: 2, LayerKind.SPARSE: 21, LayerKind.HEAVY: 20}
    assert (shape.ratios, shape.window, shape.width, shape.rope_dim, shape.index_topk) == ((4, 128), 128, 512, 64, 512)
    assert experts.routing == RootRouting(scale=1.5, hash_layers=frozenset({0, 1, 2}))
    assert config.local_layers == frozenset({0, 1}) and config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.kind) == (10_000.0, "default")
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (160_000.0, "yarn", 16.0)
    assert config.rope.attention_factor == 1.0  # whatever YaRN has elsewhere
    assert config.context_length == 1_048_576 and config.activation.limit == 10.0
    assert config.num_mtp_layers == 1 and config.dtype == "bfloat16"


def test_transformers_and_older_files_describe_the_same_model(saved: Path, tmp_path: Path) -> None:
    """``compress_rates`` beside types of layers; or the rates by themselves, hash layers counted, one rotation."""
    expected = read_model_config(saved)
    raw = json.loads((saved / "config.json").read_text())
    assert {"compress", "main"} <= set(raw["rope_parameters"])
    for name in ("compress_rates", "mlp_layer_types", "partial_rotary_factor"):
        del raw[name]
    older = {"compress_rate_csa": 4, "compress_rate_hca": 16, "num_hash_layers": 2, "qk_rope_head_dim": 8}
    raw["rope_parameters"] = YARN
    assert parse(tmp_path, raw | older) == expected


def test_layers_without_types_alternate_behind_two_heavy_ones(tmp_path: Path) -> None:
    config = parse(tmp_path, {"architectures": FLASH["architectures"], "num_hidden_layers": 5})
    assert config.compressed is not None
    assert config.compressed.kinds == (
        LayerKind.HEAVY,
        LayerKind.HEAVY,
        LayerKind.HEAVY,
        LayerKind.SPARSE,
        LayerKind.HEAVY,
    )


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"dspark_block_size": 5}, "dspark_block_size is not supported yet: drafts of DSpark"),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0]}, "3 compress_ratios behind its 43 layers"),
        ({"compress_ratios": [0, 2] * 22}, "compress_ratios has 2; without layer_types only 0, 4, 128"),
        ({"compress_ratios": [0]}, "for 43 layers"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types of config.json has full_attention"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types names dense"),
        ({"vision_config": {"hidden_size": 4}}, "vision_config is not supported: images"),
        ({"scoring_func": "softmax"}, "experts with scoring_func softmax"),
        ({"norm_topk_prob": False}, "norm_topk_prob false"),
        ({"n_shared_experts": 2}, "2 shared experts"),
        ({"o_groups": 7}, "64 attention heads do not divide into 7 groups"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim 256 is more than rows or index keys have"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0"),
        ({"num_key_value_heads": 2}, "2 key-value heads"),
        ({"hc_mult": 1000}, "hc_mult is 1000, and the most is 64"),
        ({"head_dim": "512"}, "Expected"),
        ({"hc_sinkhorn_iters": 2**31 - 1}, "hc_sinkhorn_iters is 2147483647, and the most is 1024"),
        (
            {"num_hidden_layers": 2**31 - 1, "compress_ratios": None},
            "num_hidden_layers is 2147483647, and a number from 1",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hash_layers": "x"}, "num_hash_layers is 'x'"),
        ({"num_hash_layers": 2, "mlp_layer_types": ["moe"] * 43}, "does not name the 2 first layers alone"),
        ({"mlp_layer_types": 7}, "mlp_layer_types is 7"),
        ({"layer_types": [[]] * 43}, "a list with the name of a type for each"),
        ({"compress_ratios": [[]] * 43}, "a list with a number for each"),
        ({"layer_types": [WINDOW] * 43}, f"compress_ratios has 4 for a layer of {WINDOW}, whose rate is 0"),
        ({"compress_rate_csa": 8}, f"compress_ratios has 4 for a layer of {SPARSE}, whose rate is 8"),
        ({"compress_rates": {SPARSE: 0}}, f"the rate of {SPARSE} is 0"),
        ({"compress_rates": {HEAVY: 2**31 - 1}}, f"the rate of {HEAVY} is 2147483647"),
        ({"partial_rotary_factor": 0.25}, "differ: 64, 128 elements"),
        ({"partial_rotary_factor": [1]}, "partial_rotary_factor is .1. of a head_dim of 512"),
        ({"rope_scaling": {"main": {}}}, "both main and compress are wanted, or neither"),
        ({"rope_scaling": {"main": {}, "compress": {}}}, "rope_parameters.compress lacks rope_theta"),
        ({"index_topk": 10**6}, "index_topk is 1000000, and the most is 8192"),
        ({"compress_rope_theta": 0}, "Expected `float` >= 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, change: dict[str, Any], fact: str) -> None:
    with pytest.raises(ModelError, match=fact):
        parse(tmp_path, FLASH | change)


def test_parameters_are_counted_and_named_in_both_spellings(saved: Path, tmp_path: Path) -> None:
    save_compressed(tmp_path, save={"save_original_format": False})
    config = read_model_config(saved)
    assert config == read_model_config(tmp_path)
    table = compressed_table(config)
    assert config.num_params == sum(piece.num_elements for pieces in table.values() for piece in pieces)
    device = torch.device("cpu")
    for dtype in (torch.float32, torch.float64):
        released, own = (load_parameters(each, config, dtype, device, "auto") for each in (saved, tmp_path))
        assert released.keys() == own.keys() == table.keys()
        assert all(torch.equal(released[name], own[name]) for name in own)
    drawn = load_parameters(saved, config, torch.bfloat16, device, "dummy")
    assert drawn["layers.0.expert_table"].dtype == torch.int64 and drawn["layers.0.expert_table"].max() < 8
    assert drawn["layers.1.position_bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("released", "own"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("hc_head_base", "model.hc_head.hc_base"),
        ("layers.3.hc_ffn_scale", "model.layers.3.ffn_hc.scale"),
        ("layers.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("layers.3.attn.kv_norm.weight", "model.layers.3.self_attn.kv_norm.weight"),
        ("layers.3.attn.compressor.norm.weight", "model.layers.3.self_attn.compressor.kv_norm.weight"),
        ("layers.3.attn.indexer.compressor.ape", "model.layers.3.self_attn.compressor.indexer.position_bias"),
        ("layers.3.attn.indexer.wq_b.weight", "model.layers.3.self_attn.compressor.indexer.q_b_proj.weight"),
        (
            "layers.3.attn.indexer.weights_proj.weight",
            "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight",
        ),
        ("layers.3.attn.wq_b.scale", "model.layers.3.self_attn.q_b_proj.weight_scale_inv"),
        ("layers.3.ffn.experts.7.w3.weight", "model.layers.3.mlp.experts.7.up_proj.weight"),
        ("layers.3.ffn.shared_experts.w2.weight", "model.layers.3.mlp.shared_experts.down_proj.weight"),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
    ],
)
def test_released_names_become_those_of_transformers_which_stay(released: str, own: str) -> None:
    assert compressed_name(released) == own == compressed_name(own)


def test_a_table_of_experts_that_are_not_there_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_compressed(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.ffn.gate.tid2eid"
    config = read_model_config(tmp_path)
    for change, fact in ((tensors[name] + 4, "names experts 4 to 11, of 8"), (tensors[name].float(), "holds F32")):
        save_file(tensors | {name: change}, path, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=fact):
            load_parameters(tmp_path, config, torch.float32, torch.device("cpu"), "auto")


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_compressed(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (name,) = [each for each in tensors if compressed_name(each) == "model.layers.1.self_attn.kv_norm.weight"]
    save_file(tensors | {compressed_name(name): tensors[name] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has model.layers.1.self_attn.kv_norm.weight under two names"):
        load_parameters(tmp_path, read_model_config(tmp_path), torch.float32, torch.device("cpu"), "auto")


def test_each_kind_of_layer_stores_what_it_reads(saved: Path) -> None:
    config = read_model_config(saved)
    plan = config.cache_plan("float64", frees_windows=True, max_draft=3)
    groups = {group.name: group for group in plan.groups}
    assert {name: (each.space, each.ratio, each.ring, each.snapshot_rows) for name, each in groups.items()} == {
        "swa": (Space.WINDOW, 1, 0, 0),
        "csa": (Space.HISTORY, 4, 0, 0),
        "csa_inputs": (Space.ROW, 1, 8 + 8, 4),
        "csa_index": (Space.HISTORY, 4, 0, 0),
        "csa_index_inputs": (Space.ROW, 1, 8 + 8, 4),
        "hca": (Space.HISTORY, 16, 0, 0),
        "hca_inputs": (Space.ROW, 1, 16 + 8, 0),
    }
    assert plan.window == 12 and plan.layers == tuple(("swa", layer) for layer in range(5))
    assert plan.beside[0] == () and plan.beside[3] == (("hca", 1), ("hca_inputs", 1))
    assert plan.beside[4] == (("csa", 1), ("csa_inputs", 1), ("csa_index", 1), ("csa_index_inputs", 1))
    facts = config.facts()
    bytes_of = {space: plan.page_bytes(space, 16) for space in Space}
    assert bytes_of[Space.HISTORY] == 8 * sum(each * (16 // ratio) for each, ratio in facts.ratio_elements)
    assert bytes_of[Space.WINDOW] == 8 * 16 * facts.window_elements == 8 * 16 * facts.slot_elements
    assert (facts.page_size, facts.page_multiple) == (128, 16)


def test_a_page_has_whole_rows_of_all_ratios(tmp_path: Path) -> None:
    """Also where neither ratio divides the other."""
    rates = {"compress_ratios": None, "num_hidden_layers": 5, "compress_rates": {SPARSE: 4, HEAVY: 6}}
    facts = parse(tmp_path, FLASH | rates).facts()
    assert (facts.page_size, facts.page_multiple) == (132, 12)


def test_scores_of_the_index_are_counted(saved: Path, tmp_path: Path) -> None:
    """For as many tokens at once as fit, and one at least."""
    step = read_model_config(saved).facts().step
    assert step.index_ratio == 4

    def counted(max_len: int) -> int:
        sizes: dict[str, Any] = {"dtype_bytes": 2, "max_rows": 4, "max_tokens": 100, "page_size": 16, "graphs": "off"}
        return step_memory(step, max_len=max_len, **sizes)["scores of the index"]

    assert counted(4096) == 100 * 1024 * SCORE_BYTES
    assert counted(2**20) == (64 << 20) // (2**18 * SCORE_BYTES) * 2**18 * SCORE_BYTES
    assert counted(2**27) == 2**25 * SCORE_BYTES
    heavy = read_model_config(save_compressed(tmp_path, layer_types=[HEAVY] * 5)).facts().step
    assert heavy.index_ratio == 0


def test_without_compressed_rows_windows_stay_as_long_as_the_history(tmp_path: Path) -> None:
    save_compressed(tmp_path, layer_types=[WINDOW] * 5)
    config = read_model_config(tmp_path)
    assert config.tail_window == 0
    (group,) = config.cache_plan("float32", frees_windows=True).groups
    assert group.space is Space.HISTORY


def test_shapes_cover_all_kinds() -> None:
    assert set(SHAPE["layer_types"]) == {WINDOW, HEAVY, SPARSE}
