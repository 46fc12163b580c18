"""Models in 8 and 4 bits through the whole engine: the tokens of transformers with the values of these weights, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.models import load_transformers, save_llama, save_qwen3
from tests.helpers.oracle import Subject, check_tokens, continuation, prompts_of
from tests.helpers.quantized import FILE, quantize_checkpoint


@pytest.mark.parametrize(
    ("name", "spec", "chunk"),
    [
        ("channel", "ngram", 64),
        ("gptq_v2", "off", 7),
        *(
            pytest.param(name, "off", 64, marks=pytest.mark.wide)
            for name in ("fp8", "modelopt", "int", "uint", "awq", "gptq")
        ),
    ],
)
def test_a_quantized_model_gives_the_tokens_of_its_values(tmp_path: Path, name: str, spec: str, chunk: int) -> None:
    """In chunks, behind cached prefixes, and with drafts."""
    torch.set_num_threads(1)
    save = save_qwen3 if name == "channel" else save_llama
    folder, plain = save(tmp_path / "quantized"), save(tmp_path / "plain", dtype=torch.float64)
    save_file({key: each.double() for key, each in quantize_checkpoint(folder, name).items()}, plain / FILE)
    oracle = load_transformers(plain, torch.float64)
    prompts = dict(enumerate(prompts_of(name, folder), start=1))
    greedy = {row: continuation(oracle, prompt) for row, prompt in prompts.items()}
    check_tokens(Subject(folder, prompts, greedy, sampled={}), chunk, 0, spec=spec).close()
