"""Draft heads of Qwen3.5 and Qwen3-Next, in the files of their model: against transformers' own layer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.config.options import make_options
from hiserve.models.draft_config import read_draft
from hiserve.models.model_config import NANO, find_model, read_model_config
from tests.helpers.draft_heads import Drafter
from tests.helpers.models import load_transformers
from tests.helpers.state_models import FILE, head_layer, save_with_head

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@torch.inference_mode()
def expected(family: str, folder: Path, text: Tensor) -> Tensor:
    """Logits behind each token but the first."""
    tensors, model = load_file(folder / FILE), load_transformers(folder, torch.float32)
    layer = head_layer(family, folder).eval()
    start = "mtp.layers.0."
    layer.load_state_dict({name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)})

    def norm(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * scale * (1 + tensors[f"mtp.{name}.weight"])

    states = model.model(text[None]).last_hidden_state[0, :-1]
    both = norm(model.model.embed_tokens(text[1:]), "pre_fc_norm_embedding"), norm(states, "pre_fc_norm_hidden")
    stream = (torch.cat(both, -1) @ tensors["mtp.fc.weight"].T)[None]
    size = stream.shape[1]
    angles = model.model.rotary_emb(stream, torch.arange(size)[None])
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    out = layer(stream, position_embeddings=angles, attention_mask=mask)
    out = out[0] if isinstance(out, tuple) else out
    return model.lm_head(norm(out[0] if out.dim() == 3 else out, "norm"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [5, 40])
def test_a_head_gives_the_logits_of_a_layer_of_transformers(tmp_path: Path, family: str, chunk: int) -> None:
    """The layer sees the embedding of a token beside the model's state of the token before."""
    folder = save_with_head(family, tmp_path)
    drafter = Drafter(folder, "mtp")
    text = torch.randint(0, 320, (37,), generator=torch.Generator().manual_seed(2))
    (shown,) = drafter.show([text], chunk)
    found = []
    for first in range(1, len(text), chunk):
        part = text[first : first + chunk]
        states = drafter.head.fuse(shown[first - 1 : first - 1 + len(part)])
        found.append(drafter.compute([(0, first, part)], states)[0])
    assert (torch.cat(found) - expected(family, folder, text)).abs().max().item() <= 2e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_comes_with_its_model_and_is_no_part_of_it(tmp_path: Path, family: str) -> None:
    config = read_model_config(save_with_head(family, tmp_path))
    assert config.num_mtp_layers == 1
    draft = read_draft(make_options(model=str(tmp_path), spec="auto"), tmp_path, config)
    assert draft is not None and draft.kind == "mtp"
    tensors = load_file(tmp_path / FILE)
    assert draft.num_params == sum(each.numel() for name, each in tensors.items() if name.startswith("mtp."))


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_those_without_drafts_also_behind_hits(tmp_path: Path, depth: int) -> None:
    save_with_head("qwen3_5_text", tmp_path)
    shutil.copy(find_model(NANO) / "tokenizer.json", tmp_path)
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(5, 300, (n,), generator=generator).tolist() for n in (1, 3, 9, 30)]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    settings: dict[str, Any] = {
        "dtype": "float64",
        "in_process": True,
        "page_size": 4,
        "kv_pages": 200,
        "max_model_len": 128,
        "max_batched_tokens": 24,
        "host_cache_gib": 0,
    }
    told = []
    for drafts in ({"spec": "off"}, {"spec": "mtp", "spec_steps": 3, "overlap": depth}):
        with LLM(str(tmp_path), **settings, **drafts) as llm:
            for _ in range(2):
                results = llm.generate(prompts, sampling)
                told.append([list(result.outputs[0].token_ids) for result in results])
            assert [result.cached.num_tokens for result in results] == [(len(each) - 1) // 4 * 4 for each in prompts]
    assert told == told[:1] * 4
