"""Engines and graphs on a device that is neither the first nor the current one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hiserve.runners.capture import Capture
from tests.helpers.cuda import MAX_LEN, MAX_ROWS, NUM_PAGES, decisions, generate, prompts_of
from tests.helpers.models import Engine
from tests.helpers.scripted import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU; these tests need a second"),
]

OTHER = torch.device("cuda", 1)
LONG = 400_000_000  # cycles: 0.2 s


@pytest.fixture(autouse=True)
def first_is_current() -> Iterator[None]:
    with torch.cuda.device(0):
        yield
        assert torch.cuda.current_device() == 0, "somebody left another device current"


def engine(folder: Path, device: str, graphs: str) -> Engine:
    sizes = {"num_pages": NUM_PAGES, "max_len": MAX_LEN, "max_rows": MAX_ROWS, "max_batched_tokens": 256}
    widths = (1, 4) if graphs == "all" else (1,)
    with torch.cuda.device(device):  # as a worker is started: what loads and compiles is made for its device
        return Engine(folder, dtype="float32", device=device, attention="triton", graphs=graphs, widths=widths, **sizes)


def test_steps_and_replays_on_the_second_device_give_the_tokens_of_the_first(nano: Path) -> None:
    """Steps are launched by a thread whose current device is the first."""
    prompts = prompts_of([20, 3, 65, 130], seed=5)
    first = engine(nano, "cuda:0", "off")
    expected = generate(first, prompts, 24)
    first.executor.close()
    for graphs in ("off", "all"):
        subject = engine(nano, str(OTHER), graphs)
        before = torch.cuda.memory_allocated(0)
        assert generate(subject, prompts, 24) == expected
        if graphs == "all":
            assert verify(subject, prompts, expected, 4) == expected
            counts = decisions(subject)
            assert counts["replay/decode"] == 23 and counts["replay/verify"] > 3
        assert torch.cuda.memory_allocated(0) == before, "steps took memory of the first device"
        subject.executor.close()


def test_a_replay_runs_on_the_stream_of_its_own_device(nano: Path) -> None:
    """Behind what that stream was given before, and while the other device is busy."""
    capture = Capture(OTHER)
    x, y = torch.zeros(8, device=OTHER), torch.zeros(8, device=OTHER)
    with capture.on_stream():
        graph = capture.record(lambda: y.copy_(x).add_(1))
    torch.cuda._sleep(LONG)  # on the first
    with torch.cuda.device(OTHER):
        torch.cuda._sleep(LONG)
        x.fill_(41)
    graph.replay()
    assert torch.cuda.current_device() == 0
    torch.cuda.current_stream(OTHER).synchronize()
    assert y.tolist() == [42.0] * 8
