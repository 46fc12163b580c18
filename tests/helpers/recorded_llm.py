"""Engines on the CPU whose graphs are recorded: all kinds of them, made by the code that makes those of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hiserve import LLM
from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.reference import ReferenceAttention
from hiserve.config import Config
from hiserve.core import resolve
from hiserve.runners import rows
from hiserve.worker import drafting, runners
from tests.helpers.recorded import RecordableAttention, RecordedCapture, recordable_ops
from tests.helpers.tiered import engine_of


def allow_recording(patch: pytest.MonkeyPatch, attention: type[RecordableAttention] = RecordableAttention) -> None:
    """Lets engines on the CPU have graphs, which are recorded, wherever ``graphs`` asks for them.

    Args:
        patch: Undoes it.
        attention: Of the model.
    """

    def open_recordable(name: str, shape: AttentionShape, device: torch.device) -> Attention:
        return attention(ReferenceAttention(shape))

    def open_draft(name: str, shape: AttentionShape, device: torch.device) -> Attention:
        return RecordableAttention(ReferenceAttention(shape))

    def graphs_of(config: Config, *, on_cpu: bool) -> Any:
        return "off" if config.runner.graphs == "auto" else config.runner.graphs

    patch.setattr(resolve, "_graphs", graphs_of)
    patch.setattr(runners, "Capture", lambda device: RecordedCapture())
    patch.setattr(runners, "open_attention", open_recordable)
    patch.setattr(drafting, "open_draft_attention", open_draft)
    patch.setattr(rows, "step_ops_for", lambda device: recordable_ops())
    patch.setattr(torch.cuda, "memory_reserved", lambda device: 0)


def recorded(**settings: Any) -> LLM:
    """Makes an engine with graphs that starts rows before their loads have arrived, as one on a GPU does."""
    llm = LLM(**{"graphs": "all"} | settings)
    engine_of(llm)._planner._overlaps_loads = True
    return llm
