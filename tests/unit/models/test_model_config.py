"""config.json and generation_config.json: both spellings, and every way to be wrong is a ModelError."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from hiserve.errors import ModelError
from hiserve.models.family import FAMILIES
from hiserve.models.model_config import NANO, find_model, read_model_config
from tests.helpers.checkpoint_folder import LLAMA, folder
from tests.helpers.models import FAMILIES as SAVED
from tests.helpers.models import load_transformers, save_family

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
REQUIRED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
]


def refusal(place: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read_model_config(place)
    assert refused.value.param == "model"
    assert "\n" not in refused.value.message
    return refused.value.message


# --- what is read -----------------------------------------------------------------------------


def test_every_field_is_read(tmp_path: Path) -> None:
    found = read_model_config(folder(tmp_path, head_dim=24, tie_word_embeddings=True))
    assert found.architecture == "LlamaForCausalLM"
    assert (found.vocab_size, found.hidden_size, found.intermediate_size, found.num_layers) == (320, 64, 96, 3)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 24)
    assert (found.norm_eps, found.rope.theta, found.context_length) == (1e-6, 5e4, 512)
    assert (found.tie_embeddings, found.has_qk_norm, found.dtype) == (True, False, "bfloat16")
    assert (found.eos_token_ids, found.bos_token_id) == ((2,), 1)


def test_old_and_new_spellings_say_the_same(tmp_path: Path) -> None:
    new = read_model_config(folder(tmp_path))
    old = folder(tmp_path, ("rope_parameters", "dtype"), rope_theta=5e4, torch_dtype="bfloat16", rope_scaling=None)
    assert read_model_config(old) == new


def test_what_is_left_out_has_its_usual_value(tmp_path: Path) -> None:
    optional = (
        "num_key_value_heads",
        "rope_parameters",
        "tie_word_embeddings",
        "dtype",
        "eos_token_id",
        "bos_token_id",
    )
    found = read_model_config(folder(tmp_path, optional))
    assert (found.num_kv_heads, found.head_dim, found.rope.theta) == (4, 16, 10_000.0)
    assert (found.tie_embeddings, found.dtype) == (False, "float32")
    assert (found.eos_token_ids, found.bos_token_id) == ((), None)


def test_qwen3_has_norms_on_queries_and_keys(tmp_path: Path) -> None:
    assert read_model_config(folder(tmp_path, architectures=["Qwen3ForCausalLM"])).has_qk_norm


def test_biases_of_each_family(tmp_path: Path) -> None:
    """transformers reads ``attention_bias`` and ``mlp_bias`` for some; Qwen2 has its own rule."""
    expected = {
        "LlamaForCausalLM": (True, True, True),
        "MistralForCausalLM": (False, False, False),
        "MixtralForCausalLM": (False, False, False),
        "Qwen2ForCausalLM": (True, False, False),
        "MiMoForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (True, True, False),
        "Qwen3MoeForCausalLM": (True, True, False),
        "Gemma3ForCausalLM": (True, True, False),
        "Gemma3ForConditionalGeneration": (True, True, False),
        "GptOssForCausalLM": (True, True, False),
    }
    assert set(expected) == {
        name
        for name, family in FAMILIES.items()
        if not (family.has_latents or family.is_compressed or family.has_states)
    }
    for architecture, biases in expected.items():
        place = folder(tmp_path, architectures=[architecture], attention_bias=True, mlp_bias=True, sliding_window=None)
        found = read_model_config(place)
        assert (found.has_qkv_bias, found.has_out_bias, found.has_mlp_bias) == biases
    assert not read_model_config(folder(tmp_path)).has_qkv_bias


@pytest.mark.parametrize("name", list(SAVED))
def test_what_config_json_leaves_out_is_what_transformers_fills_in(tmp_path: Path, name: str) -> None:
    """A file with the required fields alone, read by both."""
    raw = {"architectures": [], "model_type": name} | {field: LLAMA[field] for field in REQUIRED}
    raw |= {"num_attention_heads": 64, "hidden_size": 64 * 12}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    architecture = {each.lower(): each for each in FAMILIES}[f"{name.replace('_', '')}forcausallm"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    found = read_model_config(tmp_path)
    assert found.num_kv_heads == theirs.num_key_value_heads
    assert found.head_dim == (getattr(theirs, "head_dim", None) or 12)
    assert found.rope.theta == theirs.rope_parameters["rope_theta"]
    assert found.tie_embeddings == theirs.tie_word_embeddings
    if found.experts is not None:
        assert found.experts.num_experts == theirs.num_local_experts
        assert found.experts.num_per_token == theirs.num_experts_per_tok
        assert found.experts.is_normalized == getattr(theirs, "norm_topk_prob", True)
        assert found.experts.intermediate_size == getattr(theirs, "moe_intermediate_size", raw["intermediate_size"])
    assert (found.experts is not None) == hasattr(theirs, "num_experts_per_tok")


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def test_experts_are_in_the_layers_that_step_and_list_leave(tmp_path: Path) -> None:
    for step, dense, layers in ((1, [], [0, 1, 2]), (2, [], [1]), (1, [1, 7, -1], [0, 2]), (3, [0], [2])):
        place = folder(tmp_path, num_experts=6, decoder_sparse_step=step, mlp_only_layers=dense, **MOE)
        experts = read_model_config(place).experts
        assert experts is not None
        assert [layer for layer in range(3) if experts.is_in(layer)] == layers
        assert experts.num_layers(3) == len(layers)
        assert (experts.num_experts, experts.num_per_token, experts.intermediate_size) == (6, 2, 40)
    for none in ({"num_experts": 0}, {"num_experts": 6, "mlp_only_layers": [0, 1, 2]}):
        assert read_model_config(folder(tmp_path, **MOE, **none)).experts is None


def test_both_names_of_the_number_of_experts_are_read(tmp_path: Path) -> None:
    for name in ("num_experts", "num_local_experts"):
        experts = read_model_config(folder(tmp_path, **MOE, **{name: 5})).experts
        assert experts is not None
        assert experts.num_experts == 5


def test_fields_of_other_families_are_not_read(tmp_path: Path) -> None:
    plain = read_model_config(folder(tmp_path))
    odd = folder(tmp_path, num_experts=8, num_experts_per_tok=2, sliding_window=16, use_sliding_window=True)
    assert read_model_config(odd) == plain


SLIDES = ["full_attention", "sliding_attention", "sliding_attention"]
WINDOWS: list[tuple[str, dict[str, Any], list[int]]] = [
    # architecture, changes, layers that have the window
    ("Mistral", {}, []),
    ("Mistral", {"sliding_window": 511}, [0, 1, 2]),
    ("Mistral", {"sliding_window": 512}, []),
    ("Mistral", {"sliding_window": None}, []),
    ("Mistral", {"sliding_window": 16, "use_sliding_window": False}, [0, 1, 2]),
    ("Mistral", {"sliding_window": 16, "max_window_layers": 2}, [0, 1, 2]),
    ("Mistral", {"max_position_embeddings": 8192}, [0, 1, 2]),
    ("Mixtral", {"sliding_window": 16}, [0, 1, 2]),
    ("Mixtral", {"max_position_embeddings": 8192}, []),
    ("Llama", {"sliding_window": 16, "use_sliding_window": True, "layer_types": SLIDES}, []),
    ("Qwen2", {"sliding_window": 16}, []),
    ("Qwen2", {"sliding_window": 16, "use_sliding_window": True}, []),
    ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, [2]),
    ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, []),
    ("Qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, []),
    ("Qwen3", {"sliding_window": 16, "use_sliding_window": True, "layer_types": SLIDES}, [1, 2]),
    ("Qwen3", {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}, []),
    ("Qwen3Moe", {"sliding_window": 16}, []),
    ("Qwen3Moe", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 9}, [0, 1, 2]),
]


@pytest.mark.parametrize(("family", "changes", "sliding"), WINDOWS)
def test_windows_are_those_that_a_request_could_outgrow(
    tmp_path: Path, family: str, changes: dict[str, Any], sliding: list[int]
) -> None:
    found = read_model_config(folder(tmp_path, **{"architectures": [f"{family}ForCausalLM"]} | changes))
    window = changes.get("sliding_window", 4096)
    assert found.windows == (tuple(window if layer in sliding else None for layer in range(3)) if sliding else ())


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"layer_types": SLIDES[1:]}, "names 2 layers, and num_hidden_layers is 3"),
        ({"layer_types": SLIDES, "use_sliding_window": False}, "there is no sliding_window"),
        ({"layer_types": SLIDES, "sliding_window": None}, "there is no sliding_window"),
        ({"layer_types": ["linear_attention", *SLIDES[1:]]}, "linear_attention, which is not supported yet"),
    ],
)
def test_types_of_layers_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], fact: str) -> None:
    given = {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 16, "use_sliding_window": True}
    assert fact in refusal(folder(tmp_path, **given | changes))


@pytest.mark.parametrize(
    ("generation", "ends"),
    [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 0}, (0,)), ({}, (2,)), ({"eos_token_id": None}, (2,))],
)
def test_end_tokens_of_the_generation_config_go_first(tmp_path: Path, generation: Any, ends: tuple[int, ...]) -> None:
    assert read_model_config(folder(tmp_path, generation=generation)).eos_token_ids == ends


def test_fields_nobody_asks_for_may_hold_anything(tmp_path: Path) -> None:
    assert read_model_config(folder(tmp_path, use_cache="?", auto_map=[1], pad_token_id=-1, attention_bias=False))


def test_the_embedded_model_is_found() -> None:
    assert read_model_config(find_model(NANO)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("family", SAVED)
@pytest.mark.parametrize("tie", [True, False])
def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path, family: str, tie: bool) -> None:
    place = save_family(family, tmp_path / "model", tie_word_embeddings=tie)
    oracle = load_transformers(place, torch.float32)
    found = read_model_config(place)
    assert found.num_params == sum(parameter.numel() for parameter in oracle.parameters())
    assert found.tie_embeddings == tie
    facts = found.facts()
    assert facts.slot_elements == 2 * 3 * 2 * found.head_dim
    assert (facts.num_params, facts.context_length, facts.step.vocab_size) == (found.num_params, 512, 320)
    assert facts.checkpoint_dtype == "float32"


# --- what is refused --------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "", "~nobody-of-this-name/x", "x" * 5000, "a\0b"):
        with pytest.raises(ModelError, match=r"no model folder at .*hiserve-nano"):
            find_model(name)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ModelError, match="no model folder"):
        find_model(str(tmp_path / "model"))


def test_a_folder_without_config_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("given", [["GPT2LMHeadModel"], "GPT2LMHeadModel", [], None, 5, [["LlamaForCausalLM"]], [None]])
def test_an_unsupported_architecture_is_named_with_the_list(tmp_path: Path, given: Any) -> None:
    message = refusal(folder(tmp_path, architectures=given))
    assert "not supported" in message
    assert all(name in message for name in FAMILIES)
    assert "GPT2LMHeadModel" in message or "GPT2" not in str(given)


def test_an_unsupported_architecture_is_named_whatever_else_its_file_says(tmp_path: Path) -> None:
    text = '{"architectures": ["MambaForCausalLM"], "time_step_limit": [0.0, Infinity]}'
    (tmp_path / "config.json").write_text(text)
    assert "MambaForCausalLM" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config of the quant_method bitsandbytes",
        ),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quantization_config of the quant_method ['fp8']"),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 128]}}, "weight_block_size [64, 128]"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt e5m2"),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 4.0}}, "mrope"),
        ({"rope_parameters": None, "rope_scaling": {"type": "proportional"}}, "proportional"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_setting_we_would_compute_wrongly_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    message = refusal(folder(tmp_path, **changes))
    assert named in message
    assert "not supported" in message


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '"x"', "\udcff", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"],
    ids=["empty", "cut", "list", "number", "string", "not UTF-8", "deep", "digits"],
)
def test_a_file_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "config.json" in refusal(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    (folder(tmp_path) / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(tmp_path)
    for wrong in ("two", [1, -1], {"a": 1}, 1.5):
        assert "generation_config.json" in refusal(folder(tmp_path, generation={"eos_token_id": wrong}))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    assert name in refusal(folder(tmp_path, (name,)))


@pytest.mark.parametrize("name", [*REQUIRED, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, "64", 2**40, float("nan"), float("inf"), [1], True, {}])
def test_a_size_that_makes_no_sense_is_named(tmp_path: Path, name: str, value: Any) -> None:
    assert name in refusal(folder(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"num_key_value_heads": 8}, "4 attention heads are not a multiple of 8"),
        ({"hidden_size": 66}, "hidden_size 66"),
        ({"hidden_size": 2}, "hidden_size 2"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"dtype": 3}, "dtype"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": 4}}, "rope_type"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}, "3 experts per"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": -1}, "num_experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"torch_dtype": "float16"}, "torch_dtype and dtype differ"),
    ],
)
def test_values_that_contradict_each_other_or_have_the_wrong_type(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    message = refusal(folder(tmp_path, **changes))
    assert named in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("name", "most"),
    {
        "vocab_size": 2**24,
        "hidden_size": 2**20,
        "num_hidden_layers": 2**12,
        "num_attention_heads": 2**14,
        "num_key_value_heads": 2**14,
        "head_dim": 2**16,
        "intermediate_size": 2**22,
        "num_experts": 2**14,
        "num_experts_per_tok": 2**14,
        "moe_intermediate_size": 2**22,
        "num_nextn_predict_layers": 2**6,
    }.items(),
)
def test_a_size_that_no_model_has_is_refused_before_anything_is_built_of_it(
    tmp_path: Path, name: str, most: int
) -> None:
    """The first size is one too many, so that the test ends also where nothing refuses it."""
    base = {"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 64, "use_sliding_window": True} | MOE
    for size in (most + 1, 2**31 - 1):
        place = folder(tmp_path, **base | {name: size})
        tracemalloc.start()
        message = refusal(place)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert f"{name} is {size}, and the most is {most}" in message
        assert "Correct it, or fetch the file again." in message
        assert peak < 2**20


def test_layers_times_experts_are_bounded_too(tmp_path: Path) -> None:
    shape = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4096, "num_experts": 128}
    message = refusal(folder(tmp_path, **MOE | shape))
    assert "its experts have 1572864 matrices, and the most is 1048576" in message


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None)
@given(
    name=st.sampled_from([*LLAMA, *MOE, "head_dim", "rope_scaling", "torch_dtype", "rope_theta", "mlp_only_layers"]),
    value=anything,
    base=st.sampled_from([{}, MOE]),
)
def test_whatever_a_field_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any, base: dict[str, Any]
) -> None:
    place = tmp_path_factory.getbasetemp() / "any"
    place.mkdir(exist_ok=True)
    try:
        found = read_model_config(folder(place, **base | {name: value}))
    except ModelError:
        return
    assert found.num_params > 0
    assert found.num_heads % found.num_kv_heads == 0
