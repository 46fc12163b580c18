"""The least that a step of a model with windows, latents or experts must read or multiply."""

from __future__ import annotations

import pytest

from benchmarks.hybrid import SHAPES, Least
from hiserve.models.builtin_shapes import shape_config

PACKED = {"gpt-oss-20b-mxfp4": "gpt-oss-20b", "v4-flash-like-fp4": "v4-flash-like"}


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in PACKED])
def test_a_token_of_an_empty_row_reads_its_own_experts_and_many_rows_read_all(shape: str) -> None:
    model = shape_config(shape)
    least = Least(model, "bfloat16")
    table = model.vocab_size * model.hidden_size
    hashed = 0 if model.experts is None else model.experts.hash_params(model.vocab_size)
    everything = 2 * (model.num_params - hashed - (0 if model.tie_embeddings else table))
    carried = least.carried_bytes()
    assert least.decode_bytes(10_000, 0) - 10_000 * carried == pytest.approx(everything)
    everything += carried
    if model.experts is None:
        assert least.decode_bytes(1, 0) == everything
        return
    experts = model.experts
    spared = experts.num_layers(model.num_layers) * (experts.num_experts - experts.num_per_token)
    spared *= 3 * model.hidden_size * experts.intermediate_size
    assert least.decode_bytes(1, 0) == pytest.approx(everything - 2 * spared)


@pytest.mark.parametrize(
    ("shape", "layers", "matrix", "others"),
    [
        # Rows of 2880 numbers end within a block; 17 words a block.
        ("gpt-oss-20b-mxfp4", 24, 3 * 2880 * 23 * 17 * 4, ()),
        # The shared expert and the last product of attention are in FP8.
        ("v4-flash-like-fp4", 6, (2 * 2048 * 32 + 4096 * 16) * 17 * 4, (3 * 2048 * 4096, 8192 * 4096)),
    ],
)
def test_packed_experts_are_read_as_they_are(shape: str, layers: int, matrix: int, others: tuple[int, ...]) -> None:
    model, plain = shape_config(shape), Least(shape_config(PACKED[shape]), "bfloat16")
    experts, least = model.experts, Least(model, "bfloat16")
    assert experts is not None
    params = 3 * model.hidden_size * experts.intermediate_size
    for num_rows, count in ((1, experts.num_per_token), (10_000, experts.num_experts)):
        saved = layers * (count * (2 * params - matrix) + sum(each - each // 128**2 * 4 for each in others))
        assert plain.decode_bytes(num_rows, 0) - least.decode_bytes(num_rows, 0) == pytest.approx(saved)


def test_latents_are_read_once_and_windows_no_further_than_they_reach() -> None:
    glm, gemma = (Least(shape_config(name), "bfloat16") for name in ("glm-4.7-flash", "gemma-3-27b"))
    assert glm.decode_bytes(4, 1000) - glm.decode_bytes(4, 0) == pytest.approx(4 * 1000 * 47 * 576 * 2)
    local = sum(window is not None for window in shape_config("gemma-3-27b").windows)
    read = (62 - local) * 8192 + local * 1024
    assert local == 52
    assert gemma.decode_bytes(1, 8192) - gemma.decode_bytes(1, 0) == pytest.approx(2 * 2 * 16 * 128 * read)


def test_a_prompt_multiplies_each_pair_of_a_query_and_a_key_that_it_sees() -> None:
    """Two tokens: three pairs in every layer; latents have keys of 256 elements and values of 256."""
    glm = Least(shape_config("glm-4.7-flash"), "bfloat16")
    assert glm.prompt_flop(2) - 2 * glm.prompt_flop(1) == pytest.approx(2 * 47 * 20 * (256 + 256))
    gemma = Least(shape_config("gemma-3-27b"), "bfloat16")
    in_windows = sum(min(place, 1024) for place in range(1, 2049))
    attended = gemma.prompt_flop(2048) - 2048 * (gemma.prompt_flop(1) - 2 * 32 * 256 * 62)
    assert attended == pytest.approx(2 * 32 * 256 * (52 * in_windows + 10 * 2048 * 2049 // 2))


def test_a_row_reads_and_writes_its_states_whatever_its_length() -> None:
    qwen = Least(shape_config("qwen3.5-35b-a3b"), "bfloat16")
    states, inputs = 30 * 32 * 128 * 128 * 4, 30 * (2 * 16 * 128 + 32 * 128 + 2 * 32) * 2
    assert qwen.carried_bytes() == 2 * (states + inputs)
    assert qwen.decode_bytes(2, 1000) - qwen.decode_bytes(2, 0) == pytest.approx(2 * 1000 * 10 * 2 * 2 * 256 * 2)


@pytest.mark.parametrize(
    ("context", "scanned", "chosen", "heavy", "window"),
    [(100, 25, 25, 0, 100), (1024, 256, 256, 8, 128), (131_072, 32_768, 512, 1024, 128)],
)
def test_compressed_rows_are_scanned_by_their_index_and_those_chosen_are_read(
    context: int, scanned: int, chosen: int, heavy: int, window: int
) -> None:
    """In two sparse layers and two heavy ones; all six have windows."""
    v4 = Least(shape_config("v4-flash-like"), "bfloat16")
    read = 2 * (scanned * 128 + chosen * 512) + 2 * heavy * 512 + 6 * window * 512
    assert v4.decode_bytes(1, context) - v4.decode_bytes(1, 0) == pytest.approx(2 * read)
    packed = Least(shape_config("v4-flash-like"), "bfloat16", packs_rows=True)
    read = 2 * (scanned * 132 + chosen * 584) + 2 * heavy * 584 + 6 * window * 584
    assert packed.decode_bytes(1, context) - packed.decode_bytes(1, 0) == pytest.approx(read)


def test_an_index_beside_latents_is_scanned_where_it_must_choose() -> None:
    v32, v3 = (Least(shape_config(name), "bfloat16") for name in ("v3.2-like", "v3-like"))
    for context, keys, rows in ((2048, 0, 2048), (8192, 8192, 2048)):
        read = 6 * (keys * 128 + rows * 576)
        assert v32.decode_bytes(1, context) - v32.decode_bytes(1, 0) == pytest.approx(2 * read)
    per_token = 2 * 6 * (1536 * 64 * 128 + (128 + 64) * 7168 + 2 * 128)
    assert v32.prompt_flop(2048) - v3.prompt_flop(2048) == pytest.approx(2048 * per_token)
    more = v32.prompt_flop(2049) - v32.prompt_flop(2048)
    assert more - (v32.prompt_flop(2048) - v32.prompt_flop(2047)) == pytest.approx(2 * 6 * 64 * 128 * 2049)


def test_the_inputs_of_compressed_rows_are_written_once_and_read_once() -> None:
    v4 = Least(shape_config("v4-flash-like"), "bfloat16")
    assert v4.carried_bytes() == 2 * 4 * 2 * (4 * 512 + 4 * 128 + 2 * 512)


def test_a_prompt_multiplies_compressed_rows_and_states() -> None:
    v4, model = Least(shape_config("v4-flash-like"), "bfloat16"), shape_config("v4-flash-like")
    products = v4.prompt_flop(1) - 2 * 64 * 1024 * 6  # one token sees itself, in the windows of all layers
    length = 300
    in_windows = 6 * sum(min(place, 128) for place in range(1, length + 1))
    rows = sum(place // 4 for place in range(1, length + 1))
    heavy = sum(place // 128 for place in range(1, length + 1))
    pairs = in_windows + 2 * rows + 2 * heavy
    expected = length * products + 2 * 64 * 1024 * pairs + 2 * 2 * 64 * 128 * rows
    assert v4.prompt_flop(length) == pytest.approx(expected)
    assert model.num_heads == 64
    qwen = Least(shape_config("qwen3.5-35b-a3b"), "bfloat16")
    more = qwen.prompt_flop(2) - 2 * qwen.prompt_flop(1)
    assert more == pytest.approx(2 * 16 * 512 * 10), "states cost every token the same"
