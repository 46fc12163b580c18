"""Where graphs are launched, as far as that can be seen without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hiserve.runners.capture import Capture, Graph


def test_a_graph_is_launched_while_its_own_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would go to a stream of another device, whatever device the launching thread was left with."""
    entered: list[torch.device] = []
    launched: list[tuple[torch.device, ...]] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(which)
        yield
        entered.pop()

    class Launched:
        def replay(self) -> None:
            launched.append(tuple(entered))

    monkeypatch.setattr(torch.cuda, "device", device)
    graph: Any = Graph.__new__(Graph)
    graph._exchange = None
    graph._graph, graph._device = Launched(), torch.device("cuda", 1)
    graph.replay()
    assert launched == [(torch.device("cuda", 1),)] and not entered


def test_a_failure_of_the_device_is_none_of_a_capture_alone() -> None:
    """It shows in the next call, whatever error the capture ended with; after another one the device goes on."""
    capture: Any = Capture.__new__(Capture)
    capture._exchange, capture._stream = None, Mock()
    capture.check_failure(RuntimeError("operation not permitted when stream is capturing"))
    capture._stream.synchronize.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        capture.check_failure(RuntimeError("its replay differs from the eager step"))
