"""One rank of one over NCCL: its collectives in eager steps and in graphs, and their lists, where there is a single GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM
from hiserve.config.settings import Settings
from hiserve.distributed.collectives import Collectives
from hiserve.distributed.shard import Shard
from hiserve.engine import build
from hiserve.engine.executing_half import LoadedHalf, load_half
from hiserve.engine.oom_recovery import StepBackoff
from hiserve.kernels import draw, share_draw
from hiserve.kernels.step_ops import FreeDraws, TokenMasks
from hiserve.runners.capture import Capture, Graph
from tests.gpu.group_replies import SETTINGS, agreement, tokens_of
from tests.helpers.dialogues import trained
from tests.helpers.sampling import keys, random_logits, random_masks
from tests.helpers.tiered import engine_of

pytestmark = pytest.mark.gpu
NAMES = ("_all_reduce", "_all_gather")
FAILING = (3, 30, 50)  # replays: of a step of prompts, and of later ones


def test_a_graph_holds_collectives(tmp_path: Path) -> None:
    """And a collective is on the current stream, so that what follows it there has its result."""
    device = torch.device("cuda", torch.cuda.current_device())
    exchange = Collectives(Shard(0, 1), device, tmp_path / "rendezvous")
    x, logits = torch.ones((4, 256), device=device), torch.ones((4, 192), device=device)
    made: list[torch.Tensor] = []

    def work() -> None:
        made[:] = exchange.sum(x * 2), exchange.gather_columns(logits * 3, 130)

    capture = Capture(device, exchange)
    with capture.on_stream(), torch.inference_mode():
        work()
        graph = capture.record(work)
    x.fill_(5)
    exchange.expect(None)
    graph.replay()
    torch.cuda.current_stream().synchronize()
    assert made[0].unique().tolist() == [10] and made[1].shape == (4, 130) and made[1].unique().tolist() == [3]
    del graph, capture
    exchange.close()


@pytest.mark.parametrize("size", [2, 8])
def test_shares_of_logits_have_the_tokens_of_all(size: int) -> None:
    """By the kernels of one GPU: the entries that ranks would exchange, joined. Greedy tokens are the same, and drawn ones but for rounding."""
    generator = torch.Generator().manual_seed(size)
    num_rows, num_tokens = 64, 151_936
    logits = random_logits(generator, num_rows, num_tokens, torch.bfloat16).cuda()
    masks = random_masks(generator, num_rows, num_tokens)
    masks = TokenMasks(masks.entries.cuda(), masks.words.cuda())
    draws = FreeDraws(*(each.cuda() for each in keys(generator, num_rows)), torch.arange(num_rows).cuda() % 3 > 0)
    shares = [Shard(rank, size).tokens(num_tokens) for rank in range(size)]
    for given in (None, masks):
        for each, whole in ((None, draw.greedy(logits, given)), (draws, draw.draw_free(logits, *draws, given))):
            entries = [share_draw.best_entries(logits[:, first:end], first, each, given) for first, end in shares]
            joined = share_draw.join_entries(torch.stack(entries), each)
            num_other = int((joined != whole).sum())
            assert num_other <= (0 if each is None else 1), f"{num_other} of {num_rows} tokens differ"


@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("spec", ["off", "eagle3"])
def test_steps_exchange_what_was_listed_and_lose_no_token(
    graphs: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Collectives`` asserts the lists. Then three launches of graphs find no memory."""
    options: dict[str, Any] = SETTINGS | {"dtype": "float32", "graphs": graphs}
    options |= {"spec": "off"} if spec == "off" else {"spec": trained(spec), "spec_steps": 3}
    with LLM(**options) as llm:
        expected = tokens_of(llm)
    device = torch.device("cuda", torch.cuda.current_device())

    def load(settings: Settings, startup_s: dict[str, float], _: None) -> LoadedHalf:
        return load_half(settings, startup_s, Collectives(Shard(0, 1), device, tmp_path / "rendezvous"))

    num_calls = dict.fromkeys(NAMES, 0)
    for name in NAMES:
        whole = getattr(Collectives, name)

        def counted(self: Collectives, *tensors: torch.Tensor, name: str = name, whole: Any = whole) -> None:
            num_calls[name] += 1
            whole(self, *tensors)

        monkeypatch.setattr(Collectives, name, counted)
    monkeypatch.setattr(build, "load_half", load)
    with LLM(**options) as llm:
        assert agreement(expected, tokens_of(llm)) >= 0.99
        num_replays, replay = 0, Graph.replay
        assert sum(num_calls.values()) > 100

        def failing(graph: Graph) -> None:
            nonlocal num_replays
            num_replays += 1
            if num_replays in FAILING:
                raise RuntimeError("CUDA error: out of memory")
            replay(graph)

        monkeypatch.setattr(Graph, "replay", failing)
        monkeypatch.setattr(StepBackoff, "shrink", lambda *_, **__: True)  # all steps have their sizes
        again = tokens_of(llm)
        faults, counts = sum(engine_of(llm).stats().step_faults.values()), engine_of(llm).stats().graph_gate
    print(f"{graphs} {spec}: {num_calls}, {num_replays} replays, {faults} faults, {counts}")
    assert agreement(expected, again) >= 0.99
    assert faults == (len(FAILING) if graphs == "all" else 0)
