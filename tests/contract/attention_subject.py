"""An attention backend as a subject of the contract, and the error that its type allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hiserve.attention.backends import open_attention
from hiserve.attention.base import Attention, AttentionShape
from hiserve.attention.paired import PairedAttention
from tests.helpers.attention import Case

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FLASHINFER_HEAD_DIM = 128  # it compiles a module for each size of head, for minutes


@dataclass(frozen=True)
class Subject:
    """A backend, where it runs, and the type it computes in."""

    name: str
    device: str
    dtype: torch.dtype

    @property
    def uses_flashinfer(self) -> bool:
        return self.name == "flashinfer" or (self.name, self.device) == ("paired", "cuda")

    def open(self, shape: AttentionShape, **options: bool) -> Attention:
        if self.name == "triton" and self.device == "cpu":  # the interpreter; no user's choice
            from hiserve.attention.triton import TritonAttention

            return TritonAttention(shape)
        device = torch.device(self.device)
        if self.name == "paired":
            names = ("reference", "cpu") if self.device == "cpu" else ("triton", "flashinfer")
            return PairedAttention(*(open_attention(name, shape, device, **options) for name in names))
        return open_attention(self.name, shape, device, **options)

    def case(self, *arguments: Any, **options: Any) -> Case:
        if self.uses_flashinfer:
            options = {"head_dim": FLASHINFER_HEAD_DIM} | options
        return Case(*arguments, **{"dtype": self.dtype, "device": self.device} | options)

    def check(self, case: Case, layer: int = 0, **options: bool) -> torch.Tensor:
        out = case.run(self.open(case.shape, **options), layer)
        assert (out.shape, out.dtype) == (case.q.shape, self.dtype)
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.cpu().double(), case.oracle(layer)[0], atol=tolerance, rtol=tolerance)
        return out
