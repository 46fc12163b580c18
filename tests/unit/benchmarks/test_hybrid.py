"""The least that a step of a model with windows, latents or experts must read or multiply."""

from __future__ import annotations

import pytest

from benchmarks.hybrid import SHAPES, Least
from hiserve.models.builtin_shapes import shape_config


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_of_an_empty_row_reads_its_own_experts_and_many_rows_read_all(shape: str) -> None:
    model = shape_config(shape)
    least = Least(model, "bfloat16")
    table = model.vocab_size * model.hidden_size
    everything = 2 * (model.num_params - (0 if model.tie_embeddings else table))
    assert least.decode_bytes(10_000, 0) == pytest.approx(everything)
    if model.experts is None:
        assert least.decode_bytes(1, 0) == everything
        return
    experts = model.experts
    spared = experts.num_layers(model.num_layers) * (experts.num_experts - experts.num_per_token)
    spared *= 3 * model.hidden_size * experts.intermediate_size
    assert least.decode_bytes(1, 0) == pytest.approx(everything - 2 * spared)


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
