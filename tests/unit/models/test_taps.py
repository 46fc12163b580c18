"""What the decoder shows of its layers, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardOutputs
from hiserve.models.decoder import Decoder, attention_shape
from hiserve.models.loading import load_decoder
from hiserve.models.model_config import read_model_config
from tests.helpers.draft_heads import MAX_LEN, Paged
from tests.helpers.models import load_transformers, save_llama

TEXTS = (torch.arange(3, 40) * 7 % 320, torch.arange(1, 12) * 13 % 320)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def loaded(folder: Path, taps: tuple[int, ...]) -> tuple[Decoder, Paged]:
    config = read_model_config(folder)
    model = load_decoder(
        folder, config, dtype="float64", device="cpu", load_format="auto", max_len=MAX_LEN, aux_layers=taps
    )
    shape = attention_shape(config, dtype=torch.float64, page_size=16)
    return model, Paged(config.kv_groups("float64"), shape)


@torch.inference_mode()
def passes(folder: Path, taps: tuple[int, ...], chunk: int = 50) -> list[ForwardOutputs]:
    """Computes the texts in ragged chunks."""
    model, paged = loaded(folder, taps)
    outs = []
    for first in range(0, len(TEXTS[0]), chunk):
        rows = [(row, first, text[first : first + chunk]) for row, text in enumerate(TEXTS) if first < len(text)]
        outs.append(model.forward(paged.plan(rows), paged.layers, paged.attention))
    return outs


@torch.inference_mode()
def theirs(folder: Path, text: Tensor) -> dict[int, Tensor]:
    """What each layer gives, and the last norm: in float64, by number."""
    model: Any = load_transformers(folder, torch.float64)
    kept: list[Tensor] = []
    modules = [*model.model.layers, model.model.norm]
    for module in modules:
        module.register_forward_hook(
            lambda _module, _args, made: kept.append(made[0] if isinstance(made, tuple) else made)
        )
    hidden = model(text[None], output_hidden_states=True).hidden_states
    assert torch.equal(hidden[1], kept[0])
    assert torch.equal(hidden[-1], kept[-1])
    return {layer: states.view(len(text), -1) for layer, states in enumerate(kept)}


@pytest.mark.parametrize("taps", [(0,), (1, 0), (2,), (3,), (3, 0, 2, 1)])
def test_taps_show_what_transformers_computes_in_the_order_asked_for(llama: Path, taps: tuple[int, ...]) -> None:
    wanted = [theirs(llama, text) for text in TEXTS]
    (out,) = passes(llama, taps)
    assert out.hidden_states is not None
    expected = torch.cat([torch.cat([states[layer] for layer in taps], 1) for states in wanted])
    torch.testing.assert_close(out.hidden_states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("taps", [(1, 0), (3, 2)])
def test_taps_change_no_logits_and_cost_nothing_where_there_are_none(llama: Path, taps: tuple[int, ...]) -> None:
    for plain, out in zip(passes(llama, ()), passes(llama, taps), strict=True):
        assert plain.hidden_states is None
        torch.testing.assert_close(out.logits, plain.logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("taps", [(1,), (3, 2)])
def test_every_token_is_shown_whatever_logits_are_wanted(llama: Path, taps: tuple[int, ...]) -> None:
    (out,) = passes(llama, taps)
    assert out.hidden_states is not None
    whole = out.hidden_states.split([len(text) for text in TEXTS])
    parts: list[list[Tensor]] = [[], []]
    first = 0
    for chunk in passes(llama, taps, chunk=7):
        assert chunk.hidden_states is not None
        counts = [max(0, min(7, len(text) - first)) for text in TEXTS]
        for part, shown in zip(parts, chunk.hidden_states.split(counts), strict=True):
            part.append(shown)
        first += 7
    for part, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(torch.cat(part), expected, rtol=1e-9, atol=1e-9)


class _Few:
    """Counts the tokens of which the last attention's output is mapped back."""

    def __init__(self, model: Decoder) -> None:
        self.seen: list[int] = []
        self._head = model.head
        model.head = self  # type: ignore[assignment]

    def __call__(self, states: Tensor) -> Tensor:
        self.seen.append(states.shape[0])
        return self._head(states)


@torch.inference_mode()
def test_the_stages_of_a_pass_fill_what_the_caller_holds(llama: Path) -> None:
    """As graphs do it, whose output of ``trunk`` the rest leaves as it is."""
    taps = (0, 2, 3)
    (out,) = passes(llama, taps)
    model, paged = loaded(llama, taps)
    inputs = paged.plan([(row, 0, text) for row, text in enumerate(TEXTS)])
    assert model.hidden_states_size == 3 * 64
    features = torch.full((len(inputs.input_ids), model.hidden_states_size), torch.nan, dtype=torch.float64)
    attention: Attention = paged.attention
    reached = model.trunk(inputs, paged.layers, attention, features)
    kept, heads = [each.clone() for each in reached], _Few(model)
    wanted = torch.tensor([len(TEXTS[0]) - 1, len(inputs.input_ids) - 1])
    found = model.finish(reached, replace(inputs, logits_rows=wanted), features)
    torch.testing.assert_close(found.hidden_states, out.hidden_states, rtol=0, atol=0)
    torch.testing.assert_close(found.logits, out.logits[wanted], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(*both) for both in zip(reached, kept, strict=True))
    assert heads.seen == [2]
