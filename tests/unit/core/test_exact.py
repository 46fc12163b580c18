"""What ``--exact`` refuses, what it chooses, and that pages of other sums are not taken for its own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hiserve.config.options import make_options
from hiserve.core.resolve import resolve
from hiserve.core.step_memory import LEAST_SEGMENT, MAX_SEGMENTS, ModelFacts, StoredBytes, segment_for
from hiserve.errors import ConfigError
from hiserve.launch import prepare
from hiserve.models.builtin_shapes import shape_config
from hiserve.models.exactness import inexact_part
from tests.helpers.model_facts import LAPTOP, LARGE, LARGE_HEAD, NANO, SERVER

DRAFTED = msgspec.structs.replace(LARGE, draft=LARGE_HEAD)
PACKED = msgspec.structs.replace(LARGE, packed=StoredBytes(token=33_024), asks_for_packed=True)


@pytest.mark.parametrize(
    ("given", "model", "param", "words"),
    [
        ({"attention_backend": "flashinfer"}, LARGE, "attention_backend", "flashinfer, whose sums depend on the batch"),
        ({"attention_backend": "reference"}, LARGE, "attention_backend", "reference, whose sums depend on the batch"),
        ({"kv_dtype": "fp8"}, PACKED, "kv_dtype", "Leave one of them out"),
        ({"tp": 2, "device": "cpu"}, NANO, "tp", "ranks add their shares"),
        ({"spec_tree": "2x3:6", "spec": "auto"}, DRAFTED, "spec_tree", "in other slots"),
        ({"dtype": "float32"}, LARGE, "exact", "only bfloat16 and float16 .*, not float32"),
        ({}, msgspec.structs.replace(LARGE, inexact="recurrent states"), "exact", "as it has recurrent states"),
    ],
)
def test_what_has_no_order_of_its_own_is_refused(
    given: dict[str, Any], model: ModelFacts, param: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        resolve(make_options(exact=True, **given), model, SERVER)
    assert raised.value.param == param
    resolve(make_options(**given), model, SERVER)


def test_auto_packs_no_keys_and_values_and_any_type_does_on_a_cpu() -> None:
    assert resolve(make_options(), PACKED, SERVER).settings.cache.kv_dtype == "fp8"
    resolved = resolve(make_options(exact=True), PACKED, SERVER)
    assert resolved.settings.cache.kv_dtype == "bf16"
    assert any(line.endswith("made for fp8, but --exact is given") for line in resolved.decisions)
    for dtype in ("float32", "bfloat16", "float64"):
        assert resolve(make_options(exact=True, dtype=dtype), NANO, LAPTOP).settings.runner.exact


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama-8b", None),
        ("gpt-oss-20b", None),
        ("v3-like", "latent attention"),
        ("v4-flash-like", "compressed rows"),
        ("qwen3.5-35b-a3b", "recurrent states"),
        ("gpt-oss-20b-mxfp4", "weights in few bits"),
    ],
)
def test_a_shape_says_what_it_has_that_has_no_order(name: str, part: str | None) -> None:
    assert inexact_part(shape_config(name)) == part


def test_inputs_that_the_copy_engine_cannot_load_are_named() -> None:
    shape = msgspec.structs.replace(shape_config("llama-8b"), intermediate_size=14_332)
    assert inexact_part(shape) == "inputs of other than a multiple of 8 elements"


def test_a_model_that_has_no_order_is_refused_when_its_server_starts() -> None:
    given = {"load_format": "dummy", "max_model_len": 256, "kv_pages": 64}
    with pytest.raises(ConfigError, match="as it has weights in few bits"):
        prepare(make_options(exact=True, quantize="fp8", **given), LAPTOP)


def test_segments_are_few_whatever_the_longest_row_and_their_memory_is_planned() -> None:
    for max_len in (1, 4096, 16_384, 16_385, 131_072, 10_000_000):
        segment = segment_for(max_len)
        assert segment >= LEAST_SEGMENT and segment & (segment - 1) == 0 and segment * MAX_SEGMENTS >= max_len
        assert segment == LEAST_SEGMENT or segment * MAX_SEGMENTS < 2 * max_len
    plain, exact = (resolve(make_options(exact=each), LARGE, SERVER).memory for each in (False, True))
    assert "segments of attention" not in plain.parts
    assert exact.parts["segments of attention"] > 0 and exact.kv_pages < plain.kv_pages


def test_pages_of_other_sums_have_another_namespace() -> None:
    def namespace(**given: Any) -> bytes:
        return prepare(make_options(kv_pages=2048, **given)).identified().cache_identity.namespace

    exact = namespace(exact=True, max_model_len=256, cpu_threads=2)
    assert exact != namespace(max_model_len=256)
    assert exact == namespace(exact=True, max_model_len=512, cpu_threads=2)  # segments are as long
    assert exact != namespace(exact=True, max_model_len=256, cpu_threads=3, device="cpu")  # which share a product
    assert namespace(cpu_threads=2, max_model_len=256) == namespace(cpu_threads=3, max_model_len=256)
