"""What the decoder tells a device's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve.kernels import reference
from hiserve.models.decoder import attention_shape, load_decoder
from hiserve.models.model_config import read_model_config
from tests.helpers.draft_heads import MAX_LEN, Paged
from tests.helpers.models import save_llama


@torch.inference_mode()
def test_the_projection_behind_an_attention_is_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, told = reference.linear, []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        told.append(options)
        return plain(x, weight, bias, **options)

    monkeypatch.setattr(reference, "linear", linear)
    folder = save_llama(tmp_path)
    config = read_model_config(folder)
    model = load_decoder(folder, config, dtype="float64", device="cpu", load_format="auto", max_len=MAX_LEN)
    paged = Paged(config.kv_groups("float64"), attention_shape(config, dtype=torch.float64, page_size=16))
    model.forward(paged.plan([(0, 0, torch.arange(3, 9))]), paged.layers, paged.attention)
    layer = [False, True, False, False]  # queries, keys and values; the attention's output; the MLP's two
    assert told == [{"is_after_attention": each} for each in layer * config.num_layers + [False]]
