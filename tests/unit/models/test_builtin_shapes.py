"""Built-in shapes: the public ones, with weights drawn where they will lie, and somebody else's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.config.options import flags, make_options
from hiserve.engine.build import build_engine
from hiserve.errors import ConfigError, ModelError
from hiserve.models.builtin_shapes import SHAPES, read_model, shape_config
from hiserve.models.compressed_names import table_of
from hiserve.models.model_config import NANO, find_model, read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.checkpoint_folder import LLAMA
from tests.helpers.settings import identified

NUM_PARAMS = {
    "llama-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-20b-mxfp4": 20_914_757_184,
    "gemma-3-27b": 27_009_346_304,
    "glm-4.7-flash": 29_943_393_920,
    "v3-like": 10_640_235_680,
    "v3.2-like": 10_640_235_680 + 6 * (1536 * 64 * 128 + (128 + 64) * 7168 + 2 * 128),
    "qwen3.5-35b-a3b": 34_660_610_688,
    "v4-flash-like": 11_571_014_281,
    "v4-flash-like-fp4": 11_571_014_281,
}
# In bfloat16.
SLOT_BYTES = {
    "llama-8b": 128 << 10,
    "qwen3-0.6b": 112 << 10,
    "qwen3-8b": 144 << 10,
    "gpt-oss-20b": 48 << 10,
    "gpt-oss-20b-mxfp4": 48 << 10,
    "gemma-3-27b": 496 << 10,
    "glm-4.7-flash": 47 * 576 * 2,
    "v3-like": 6 * 576 * 2,
    "v3.2-like": 6 * 576 * 2,  # beside the keys of its index
    "qwen3.5-35b-a3b": 10 * 2 * 2 * 256 * 2,
    "v4-flash-like": 6 * 512 * 2,  # beside rows that stand for several tokens
    "v4-flash-like-fp4": 6 * 512 * 2,
}


def model_of(**values: Any) -> Any:
    return make_options(load_format="dummy", **values).model


def test_the_setting_names_the_built_in_shapes() -> None:
    assert flags()["shape"].choices == tuple(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_and_the_kv_of_the_public_model(name: str) -> None:
    config = shape_config(name)
    assert config.num_params == NUM_PARAMS[name]
    group, *_ = config.kv_groups("bfloat16")
    assert group.slot_bytes == SLOT_BYTES[name]
    drawn = sum(piece.num_elements for pieces in table_of(config).values() for piece in pieces)
    assert drawn == NUM_PARAMS[name]


def test_the_parameters_of_a_shape_are_made_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ``meta`` nothing is allocated: 16 GB of the host's memory would be noticed."""
    monkeypatch.setattr("hiserve.models.weights._draw", lambda *_: None)
    device = torch.device("meta")
    made = load_parameters(Path("nowhere"), shape_config("llama-8b"), torch.bfloat16, device, "dummy")
    assert {parameter.device for parameter in made.values()} == {device}
    assert sum(parameter.numel() for parameter in made.values()) == NUM_PARAMS["llama-8b"]


def test_the_folder_gives_end_tokens_and_sampling_and_nothing_else() -> None:
    folder, model = read_model(model_of(shape="qwen3-0.6b"))
    nano = read_model_config(find_model(NANO))
    assert folder == find_model(NANO)
    assert (model.eos_token_ids, model.bos_token_id) == (nano.eos_token_ids, nano.bos_token_id)
    assert model.sampling_defaults == nano.sampling_defaults
    silent = {"eos_token_ids": (), "bos_token_id": None, "sampling_defaults": type(model.sampling_defaults)()}
    assert msgspec.structs.replace(model, **silent) == shape_config("qwen3-0.6b")


def test_without_a_shape_it_is_the_folder_s_model() -> None:
    assert read_model(model_of()) == (find_model(NANO), read_model_config(find_model(NANO)))


def test_a_shape_is_refused_where_weights_are_to_be_read() -> None:
    with pytest.raises(ConfigError, match="Add --load-format dummy") as refused:
        read_model(make_options(shape="llama-8b").model)
    assert refused.value.param == "shape"


def test_a_tokenizer_with_more_tokens_than_the_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"vocab_size": 151_937}))
    with pytest.raises(ModelError, match=r"151937 tokens .* more than the 151936 of --shape qwen3-8b"):
        read_model(model_of(shape="qwen3-8b", model=str(tmp_path)))
    path.write_text(json.dumps(LLAMA | {"vocab_size": 151_936}))
    assert read_model(model_of(shape="qwen3-8b", model=str(tmp_path)))[1].eos_token_ids == (2,)


def test_a_shape_generates_from_text_and_from_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer and a small vocabulary; the rest of its path is whole."""
    torch.set_num_threads(1)
    small = {"num_hidden_layers": 1, "vocab_size": 5000}
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SHAPES["qwen3-0.6b"] | small)
    options: dict[str, Any] = {
        "host_cache_gib": 0,
        "max_model_len": 256,
        "kv_pages": 40,
        "cpu_threads": 1,
        "log_level": "warning",
    }
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    prompt = np.random.default_rng(1).integers(4096, 5000, 30).tolist()
    made = []
    for _ in range(2):
        with LLM(load_format="dummy", shape="qwen3-0.6b", in_process=True, **options) as llm:
            results = llm.generate(["A table for two", prompt], sampling)
            made.append([result.outputs[0].token_ids for result in results])
    assert made[0] == made[1]
    assert len(set(made[0][1])) > 15  # of scores that are numbers


def test_caches_of_two_shapes_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"num_hidden_layers": 1, "vocab_size": 5000, "hidden_size": 64, "intermediate_size": 64}
    namespaces = set()
    for shape in ("qwen3-0.6b", "qwen3-8b"):
        monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | tiny)
        engine = build_engine(
            identified(
                make_options(
                    load_format="dummy",
                    shape=shape,
                    device="cpu",
                    dtype="bfloat16",
                    max_model_len=64,
                    kv_pages=8,
                    max_running_requests=1,
                    max_batched_tokens=16,
                    cpu_threads=1,
                    overlap=0,
                    graphs="off",
                    spec="off",
                    host_cache_gib=0,
                )
            )
        )
        namespaces.add(engine.facts.namespace)
        engine.close()
    assert len(namespaces) == 2
