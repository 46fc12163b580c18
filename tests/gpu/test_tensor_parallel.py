"""Groups of two GPUs over NCCL, eagerly and in graphs (S1, S3), against one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hiserve import LLM
from tests.gpu.group_replies import SETTINGS, agreement, tokens_of
from tests.helpers.compressed_models import add_stream_head, save_compressed
from tests.helpers.dialogues import trained
from tests.helpers.processes import wait_dead
from tests.helpers.tiered import engine_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU; these tests need a second"),
]


@pytest.mark.parametrize(("dtype", "graphs"), [("float32", "off"), ("float32", "all"), ("bfloat16", "all")])
@pytest.mark.parametrize("spec", ["off", "eagle3", "mtp"])
def test_two_gpus_have_the_tokens_of_one(dtype: str, graphs: str, spec: str) -> None:
    """Sums of another order round otherwise, which in bfloat16 decides between close tokens; nearly all of them are equal in float32."""
    options = SETTINGS | {"dtype": dtype, "graphs": graphs}
    options |= {"spec": "off"} if spec == "off" else {"spec": trained(spec), "spec_steps": 3}
    with LLM(**options) as llm:
        expected = tokens_of(llm)
    with LLM(**options, tp=2) as llm:
        got, again = tokens_of(llm), tokens_of(llm)
        counts = engine_of(llm).stats().graph_gate
        if graphs == "all":
            assert sum(counts["replay"].values()) > sum(counts.get("eager", {}).values())
    share = agreement(expected, got), agreement(got, again)
    print(f"{dtype} {graphs} {spec}: {share[0]:.3f} as one GPU, {share[1]:.3f} as before; {counts}")
    assert share[0] >= (0.99 if dtype == "float32" else 0.3)


@pytest.mark.parametrize("graphs", ["off", "all"])
def test_two_gpus_have_the_tokens_of_one_with_compressed_rows(graphs: str, tmp_path: Path) -> None:
    """Of DeepSeek-V4, with drafts of its MTP head."""
    add_stream_head(save_compressed(tmp_path, vocab_size=4096))
    options = SETTINGS | {"model": str(tmp_path), "dtype": "float32", "attention_backend": "auto", "graphs": graphs}
    options |= {"spec": "mtp", "spec_steps": 2}
    found = []
    for size in (1, 2):
        with LLM(**options, tp=size) as llm:
            found.append(tokens_of(llm))
    print(f"{graphs}: {agreement(*found):.3f} as one GPU")
    assert (
        agreement(*found) >= 0.95
    )  # a rounding may choose another row or expert, and random weights are close to each other


@pytest.mark.parametrize(("dtype", "graphs"), [("float32", "all"), ("bfloat16", "all"), ("bfloat16", "off")])
def test_pushed_sums_have_the_tokens_of_nccl(dtype: str, graphs: str) -> None:
    """Sums of two are the same bits; the norm behind them adds squares in another order."""
    options = SETTINGS | {"dtype": dtype, "graphs": graphs, "spec": trained("eagle3"), "spec_steps": 3, "tp": 2}
    found = {}
    for exchange in ("nccl", "auto"):
        with LLM(**options, exchange=exchange) as llm:
            found[exchange] = tokens_of(llm)
            is_pushed = engine_of(llm)._executor._group.exchange._push is not None  # type: ignore[attr-defined]
            assert is_pushed == (exchange == "auto")
    share = agreement(found["nccl"], found["auto"])
    print(f"{dtype} {graphs}: {share:.3f} of the tokens are NCCL's")
    assert share >= (0.99 if dtype == "float32" else 0.3)


def test_memory_of_a_group_comes_back() -> None:
    """Its processes end, and a second group finds the devices free."""
    free = []
    for _ in range(2):
        with LLM(**SETTINGS | {"dtype": "bfloat16", "spec": "off"}, tp=2) as llm:
            ranks = engine_of(llm)._executor._group.pids  # type: ignore[attr-defined]
            tokens_of(llm)
        wait_dead(ranks)
        free.append(torch.cuda.mem_get_info(1)[0])
    assert abs(free[0] - free[1]) < 64 << 20
