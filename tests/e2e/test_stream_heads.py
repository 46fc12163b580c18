"""Heads that draft from several streams (DeepSeek-V4's MTP): against parts of transformers, and the same tokens with as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.attention.backends import open_draft_attention
from hiserve.cache.storage.device import DevicePool
from hiserve.core.forward import ForwardInputs
from hiserve.errors import ModelError
from hiserve.models.draft_config import find_draft
from hiserve.models.draft_heads import draft_attention_shape, load_draft
from hiserve.models.loading import load_decoder
from hiserve.models.model_config import read_model_config
from tests.helpers.compressed_models import add_stream_head, poison, save_compressed
from tests.helpers.compressed_oracle import PAGE, check_replies, generate, prompts_of
from tests.helpers.models import load_transformers

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.set_num_threads(1)
    folder = save_compressed(tmp_path_factory.mktemp("streams"))
    return folder, add_stream_head(folder)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


@torch.inference_mode()
def dense(head: Any, target: Any, tokens: list[int], streams: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the tokens behind ``tokens[1:]``, and the streams behind the head's layer; ``streams`` are the model's."""
    head, ids = head.double(), torch.tensor([tokens[1:]])
    embedded = F.linear(norm(target.model.embed_tokens(ids), head.enorm), head.e_proj.double())
    states = F.linear(norm(streams[None, : len(tokens) - 1], head.hnorm), head.h_proj.double())
    x = states + embedded[:, :, None]
    positions = torch.arange(len(tokens) - 1)[None]
    turns = {kind: head.model.rotary_emb(embedded, positions, layer_type=kind) for kind in ("main", "compress")}
    distance = positions[0][:, None] - positions[0]
    mask = torch.where((distance >= 0) & (distance < 12), 0.0, -torch.inf).double()[None, None]
    x = head.model.layers[0](
        x, position_embeddings=turns, position_ids=positions, attention_mask=mask, input_ids=ids, cache=None
    )
    logits: Tensor = target.lm_head(head.model.norm(head.model.hc_head(x)))
    return logits[0], x[0]


@torch.inference_mode()
def test_its_logits_are_those_of_the_layer_in_transformers(saved: tuple[Path, Any]) -> None:
    """In chunks over scattered pages, the first without logits; the slot of token 0, which has no state before it, holds NaN
    that nobody reads.
    """
    folder, theirs = saved
    target = load_transformers(folder, torch.float64)
    (tokens,) = prompts_of(NUM_TOKENS)
    seen: list[Tensor] = []
    hook = target.model.hc_head.register_forward_hook(lambda module, args, out: seen.append(args[0][0]))
    target(torch.tensor([tokens]), use_cache=False)
    hook.remove()
    expected, made = dense(theirs, target, tokens, seen[0])
    config = read_model_config(folder)
    draft = find_draft("mtp", None, folder, config)
    loading: dict[str, Any] = {"dtype": "float64", "device": "cpu", "load_format": "auto", "max_len": 128}
    model = load_decoder(folder, config, aux_layers=draft.aux_layers, **loading)
    head = load_draft(draft, model, **loading)
    assert draft.aux_layers == (5,) and head.feature_size == 4 * 64
    shared = 2 * theirs.lm_head.weight.numel()
    own = (
        sum(each.numel() for each in theirs.parameters()) - shared + 8 + 2 * 64 + 2 * 64 * 64
    )  # a bias of the choice, norms, joins
    assert draft.num_params == own
    pool = poison(DevicePool(head.groups("float64"), 9, PAGE, "cpu"))
    shape = draft_attention_shape(draft, dtype=torch.float64, page_size=PAGE)
    attention = open_draft_attention("auto", shape, torch.device("cpu"))
    table = torch.tensor([[7, 2, 5]], dtype=torch.int32)
    features = torch.cat((torch.zeros(1, 256).double(), seen[0].flatten(1)))
    pool.storage("draft")[:, :, 7 * PAGE] = torch.nan
    found, carried = [], []
    for start, end in ((1, 9), (9, 20), (20, 21), (21, 40)):
        count, places = end - start, torch.arange(start, end)
        inputs = ForwardInputs(
            input_ids=torch.tensor(tokens[start:end], dtype=torch.int32),
            positions=places - 1,
            slots=table[0, places // PAGE].long() * PAGE + places % PAGE,
            token_rows=torch.zeros(count, dtype=torch.int64),
            qo_indptr=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=torch.tensor([end]),
            page_table=table,
            logits_rows=torch.arange(count if start > 1 else 0),
            q_lens=np.array([count], dtype=np.int32),
            kv_bounds=np.array([end], dtype=np.int32),
            max_kv_len=end,
        )
        logits, states = head.forward(inputs, features[start:end], pool.layers("draft"), attention)
        found.append(logits)
        carried.append(states)
    assert found[0].shape[0] == carried[0].shape[0] == 0
    assert (torch.cat(found) - expected[8:]).abs().max() < 1e-4
    assert (torch.cat(carried) - made[8:].flatten(1)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"spec_steps": 1}, marks=pytest.mark.wide),
        {"spec_steps": 3, "overlap": 1, "max_batched_tokens": 64},
        {"spec_steps": 4, "window_pages": 0, "page_size": 32},
    ],
    ids=str,
)
def test_tokens_with_drafts_are_those_without(
    options: dict[str, Any], saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(29, 5, 61, 16)
    check_replies(saved[0], prompts, generate(saved[0], monkeypatch, prompts, spec="mtp", **options))


def test_drafts_of_dspark_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    add_stream_head(save_compressed(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"mtp.1.norm.weight": tensors["mtp.0.norm.weight"].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="drafts of DSpark"):
        find_draft("mtp", None, tmp_path, read_model_config(tmp_path))
