"""Attention as ``auto`` chooses it on Hopper: prompts by FlashInfer, rows that decode by Triton, also in graphs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.attention.base import is_hopper
from hiserve.attention.paired import PairedAttention
from tests.helpers.cuda import NUM_PAGES, PAGE, decisions, generate, graph_engine, prompts_of
from tests.helpers.margin import EPSILON_FACTOR, shape_difference
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads are those for which the contract's tests have compiled FlashInfer's kernels."""
    assert importlib.util.find_spec("flashinfer"), "auto is Triton alone without FlashInfer: pip install 'hiserve[gpu]'"
    name = torch.cuda.get_device_name()
    assert is_hopper(torch.device("cuda")), f"auto is Triton alone on {name}: these tests need a Hopper GPU"
    return save_llama(tmp_path_factory.mktemp("llama"), head_dim=128)


def engine(folder: Path, attention: str = "auto", graphs: str = "off") -> Engine:
    subject = graph_engine(folder, graphs, "bfloat16", attention=attention)
    assert isinstance(subject.attention, PairedAttention) == (attention == "auto")
    return subject


def test_mixed_steps_give_the_logits_of_the_reference(folder: Path) -> None:
    """Rows end with one token while those behind them compute chunks, behind a prefix and without one."""
    prompts = prompts_of([17, 33, 70, 129, 300], seed=3, vocab=320)
    logits = [
        engine(folder, attention).logits(HandPlanner(PAGE, NUM_PAGES, shuffle_seed=2), prompts, chunk)
        for attention, chunk in (("reference", 16), ("reference", 300), ("auto", 16), ("auto", 32), ("auto", 300))
    ]
    allowed = EPSILON_FACTOR * shape_difference(logits[0], logits[1])
    assert all(shape_difference(logits[0], each) <= allowed for each in logits[2:])


def test_graphs_decode_as_eager_steps_do(folder: Path) -> None:
    prompts = prompts_of([17, 33, 70, 129, 5, 64, 63, 200], seed=4, vocab=320)  # a full bucket: the same shapes
    tokens = []
    for graphs in ("off", "decode"):
        subject = engine(folder, graphs=graphs)
        tokens.append(generate(subject, prompts, 20))
        counts = decisions(subject)
        subject.executor.close()
        assert graphs == "off" or counts["replay/decode"] == 19
    assert tokens[0] == tokens[1]


def test_prompts_change_their_backend_between_two_steps_and_graphs_go_on(folder: Path) -> None:
    """As at a first start, when the compilers end while requests run."""
    prompts = prompts_of([17, 33, 70, 129, 5, 64, 63, 200], seed=5, vocab=320)
    wanted = []
    for attention in ("triton", "auto"):
        other = engine(folder, attention, graphs="decode")
        wanted.append(generate(other, prompts, 20))
        other.executor.close()
    subject = engine(folder, graphs="decode")
    paired: Any = subject.runners._eager._attention  # graphs have been captured with an attention of their own
    assert isinstance(paired, PairedAttention)
    paired._is_split, paired._may_split = False, lambda: False
    found = [generate(subject, prompts, 20)]
    paired._may_split = lambda: True
    found.append(generate(subject, prompts, 20))
    counts = decisions(subject)
    subject.executor.close()
    assert paired._is_split
    assert counts["replay/decode"] == 38
    assert found == wanted
