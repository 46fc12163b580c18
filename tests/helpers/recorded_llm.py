"""Engines on the CPU whose graphs are recorded: all kinds of them, made by the code that makes those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.indexed import IndexedAttention
from hiserve.attention.latent import open_with
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.attention.union import UnionAttention
from hiserve.config.settings import Settings
from hiserve.core import resolve
from hiserve.engine import build, runner_factory
from hiserve.engine.executor import Executor
from hiserve.engine.planner import Planner
from hiserve.kernels import chosen_reference
from hiserve.layers import StackedExperts
from hiserve.models import decoder
from hiserve.runners import device_rows
from tests.helpers.recorded import RecordableAttention, RecordedCapture, recordable_ops


def allow_recording(
    patch: pytest.MonkeyPatch, attention: Callable[[ReferenceAttention], Attention] = RecordableAttention
) -> list[Executor]:
    """Lets engines on the CPU have graphs, which are recorded, wherever ``graphs`` asks for them.

    As on a GPU, experts are stacked, and rows start before their loads have arrived. So there must be no canary, which is
    read when they start.

    Args:
        patch: Undoes it.
        attention: Of the model.

    Returns:
        The executors that are made from now on, for what their gates have said.
    """
    made: list[Executor] = []

    def make_executor(*args: Any, **settings: Any) -> Executor:
        made.append(Executor(*args, **settings))
        return made[-1]

    stacked: list[StackedExperts] = []

    def stack(*weights: Any) -> StackedExperts:
        stacked.append(StackedExperts(*weights))
        return stacked[-1]

    def open_recordable(name: str, shape: AttentionShape, device: torch.device, **_: Any) -> Attention:
        return recordable(shape, attention)

    def open_draft(name: str, shape: AttentionShape, device: torch.device, **_: Any) -> Attention:
        return recordable(shape, RecordableAttention)

    def recordable(shape: AttentionShape, make: Callable[[ReferenceAttention], Attention]) -> Attention:
        if shape.is_union:
            return UnionAttention(shape)
        plain = open_with(shape, lambda shape: make(ReferenceAttention(shape)))
        return plain if shape.index is None else IndexedAttention(shape, plain, chosen_reference)

    def graphs_of(config: Settings, *, on_cpu: bool) -> Any:
        return "off" if config.runner.graphs == "auto" else config.runner.graphs

    def make_planner(*, overlaps_loads: bool, **settings: Any) -> Planner:
        return Planner(overlaps_loads=True, **settings)

    patch.setattr(decoder, "StackedExperts", stack)
    patch.setattr(decoder, "SparseExperts", lambda mlps: stacked[-1])  # of these, made just before
    patch.setattr(resolve, "_graphs", graphs_of)
    patch.setattr(build, "Planner", make_planner)
    patch.setattr(build, "Executor", make_executor)
    patch.setattr(runner_factory, "Capture", lambda device, exchange: RecordedCapture(exchange))
    patch.setattr(runner_factory, "open_attention", open_recordable)
    patch.setattr(runner_factory, "open_draft_attention", open_draft)
    patch.setattr(device_rows, "step_ops_for", lambda device: recordable_ops())
    patch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    return made
