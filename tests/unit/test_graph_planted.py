"""Violations planted in code like that of the hot path, and look-alikes that do no harm: what the scan says of each."""

from __future__ import annotations

import ast
import textwrap

import pytest

from tools.graph_lint.scan import GraphHazard, scan_source

NEEDED = 0.95  # of what is planted

# What the snippets stand in: arguments, fields and helpers as the hot path has them.
AROUND = '''
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass, replace
import math
import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")

@dataclass(frozen=True)
class Forward:
    kv_lens: Tensor
    slots: Tensor
    q_lens: Int32Array
    max_kv_len: int

@dataclass(frozen=True)
class Inputs:
    """Of a step.

    Attributes:
        ready: bool ``[B]``. Rows that may go on.
    """

    forward: Forward
    legal: Tensor
    ready: Tensor
    features: Tensor | None
    parts: tuple[Tensor, ...]
    rows: "Tensor"

    @property
    def last(self) -> Tensor: ...

    def gathered(self) -> Tensor: ...

def longest(inputs: Inputs) -> Tensor: ...

class Runner:
    def __init__(self, rows: Tensor, size: int) -> None:
        self._flag = torch.zeros(1, dtype=torch.bool)
        self._rows = rows
        self._size = size
        self._lens: Int32Array = np.zeros(3, dtype=np.int32)

    def step(self, inputs: Inputs, x: Tensor, keep: Tensor, y: "Tensor | None", n: int, a: Int32Array) -> Tensor:
        """Runs a step.

        Args:
            keep: bool ``[B]``.
        """
{body}
'''

PLANTED = r"""
n = x.item()
n = inputs.forward.kv_lens.max().item()
n = int(inputs.forward.kv_lens.max())
n = float(self._rows.sum())
n = bool(self._flag)
n = int(inputs.gathered()[0])
n = int(longest(inputs))
n = int(inputs.last[0])
m = round(x.mean())
for i in range(inputs.forward.kv_lens.max()): pass
if inputs.legal.any(): pass
if inputs.legal.all() and n > 3: pass
while self._flag: pass
assert inputs.forward.slots.min() >= 0
n = 1 if self._rows[0] > 2 else 3
n = [i for i in range(n) if inputs.rows[i] > 0]
if not keep.any(): pass
m, i = x.max(0)\nif m: pass
if (m := x.sum()): pass
if y is not None and y.any(): pass
if n in x: pass
if torch.any(x > 3): pass
if torch.is_nonzero(x[0]): pass
if inputs.parts[0].any(): pass
for part in inputs.parts:\n    if part.any(): pass
for row, part in zip(a, inputs.parts):\n    n = int(part)
n = x[inputs.legal]
n = x[inputs.ready]
n = x[keep]
n = x[:, ~keep]
n = x[inputs.forward.kv_lens > 3]
n = x[keep & inputs.legal]
x[keep] = 0
m = x > 3\nn = x[m]
n = x[torch.isnan(x)]
n = inputs.features[inputs.legal]
for t in x: pass
for t in inputs.forward.slots: pass
n = list(x)
n = tuple(inputs.rows)
n = [t for t in self._rows]
n = sorted(x)
n = max(x)
print(*x)
n = f"rows {inputs.rows}"
n = f"{x.max()} tokens"
n = str(x)
print(x)
n = torch.zeros(3, device=x.device)
n = torch.full((n,), 3, device=x.device)
n = torch.empty_like(x)
n = torch.zeros_like(inputs.rows)
n = x.clone()
n = x.new_zeros(3)
n = torch.arange(n, device=x.device)
n = torch.from_numpy(a).cuda()
n = torch.tensor([n], device=x.device)
n = torch.as_tensor(a, device=x.device)
n = torch.from_numpy(a).to(x.device)
self._rows[0] = n
x[:, 1] = a
n = x.repeat_interleave(inputs.rows)
n = torch.repeat_interleave(x, inputs.forward.kv_lens)
n = torch.unique_consecutive(x)
n = x.unique()
n = torch.nonzero(x)
n = x.nonzero(as_tuple=True)
n = torch.where(x)
n = torch.masked_select(x, keep)
n = torch.argwhere(x)
n = torch.bincount(x)
n = x[: inputs.forward.kv_lens.max()]
n = x[x.argmax() :]
n = torch.arange(inputs.rows.max(), out=x)
n = a[inputs.rows[0]]
n = x.tolist()
n = inputs.forward.slots.cpu()
n = x.to("cpu")
n = x.to(CPU)
n = x.to(device="cpu", non_blocking=True)
n = x.numpy()
n = np.asarray(x)
n = np.maximum(a, x)
n = math.sqrt(x.sum())
torch.cuda.synchronize()
torch.cuda.current_stream().synchronize()
torch.cuda.empty_cache()
event.synchronize()
n = torch.equal(x, inputs.rows)
n = x.equal(inputs.rows)
n = torch.allclose(x, inputs.rows)
n = x.sum().__int__()
read = x.item\nn = read()
n = getattr(x, "item")()
"""

HARMLESS = r"""
n = int(inputs.forward.q_lens.max())
n = int(inputs.forward.max_kv_len) + int(self._size) + int(x.shape[0])
if inputs.forward.max_kv_len > 3 and a.any(): pass
if a.any() or self._lens.max() > n: pass
if inputs.features is not None and y is None: pass
if inputs.parts: pass
if x.shape[0] > 2 and x.dtype == torch.float32 and x.is_contiguous(): pass
if x.numel() and x.size(0) and len(inputs.parts): pass
if torch.cuda.is_available(): pass
for part in inputs.parts: part.add_(1)
for part, m in zip(inputs.parts, a): part.add_(1)
for i in range(x.shape[0]): pass
for i in a.tolist(): pass
n = list(inputs.parts)
n = [t.shape for t in inputs.parts]
n = x[inputs.rows]
n = x[inputs.forward.slots.long(), :3]
n = x[: inputs.forward.max_kv_len]
n = x[a.shape[0] :, None]
n = a[a > 3]
n = a.tolist() + self._lens.tolist()
n = np.unique(a)
n = np.nonzero(a)
n = a.nonzero()[0]
n = np.zeros(3)
a[0] = n
x[0] = 0
x[keep.long()] = 0
m = torch.where(keep, x, 0)
m = x.masked_fill(keep, 0)
m = x * keep
x.index_copy_(0, inputs.rows, x)
x.copy_(inputs.rows, non_blocking=True)
m = x.to(torch.float32).to(x.device)
m = torch.repeat_interleave(x, 3)
m = x.repeat_interleave(n, dim=0)
m = torch.repeat_interleave(x, inputs.rows, output_size=n)
n = f"rows {n} of {a} and {x.shape}"
n = str(n) + repr(a)
assert x.shape == inputs.rows.shape, f"{x.shape}"
n = max(n, 3) + min(a)
m = torch.cat(inputs.parts)
m = torch.sin(x, out=x)
torch.cuda.current_stream().wait_event(event)
event.record()
m = replace(inputs, rows=x)
m = n > 3 and x.max()
n = int(np.asarray(a).sum())
m = torch.stack([each[0] for each in inputs.parts])
n = [i for i, part in enumerate(inputs.parts) if part is not None]
n = self._lens.item()
"""


def snippets(text: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in text.strip().splitlines()]


def found_in(body: str, file: str = "runners/x.py") -> list[GraphHazard]:
    source = AROUND.replace("{body}", textwrap.indent(body, 8 * " "))
    ast.parse(source)
    return [each for each in scan_source(source, file) if each.function == "Runner.step"]


def test_what_is_planted_is_found() -> None:
    planted = snippets(PLANTED)
    missed = [body for body in planted if not found_in(body)]
    print(f"{len(planted) - len(missed)} of {len(planted)} found; missed: {missed}")
    assert len(planted) >= 60
    assert len(set(planted)) == len(planted)
    assert len(missed) <= (1 - NEEDED) * len(planted), missed


@pytest.mark.parametrize("body", snippets(HARMLESS))
def test_what_looks_alike_and_does_no_harm_is_not_reported(body: str) -> None:
    assert found_in(body) == []


@pytest.mark.parametrize("room", ["runners", "worker", "core", "cache/storage", "models", "kernels", "spec"])
def test_each_room_of_the_hot_path_is_read(room: str) -> None:
    """The two that the launch path was said to be free of while they stood there."""
    for body in ("torch.cuda.synchronize()", "n = x.item()"):
        assert found_in(body, f"{room}/x.py"), body


def test_a_file_of_the_planning_half_has_no_tensors() -> None:
    source = "def f(x):\n    return x.tolist()\n"
    assert scan_source(source, "engine/x.py") == []
    assert scan_source("import torch\n" + source, "engine/x.py")


def test_memory_is_taken_anew_where_steps_are_launched_alone() -> None:
    body = "n = torch.empty(3, device=x.device)"
    assert [each.pattern for each in found_in(body)] == ["allocation"]
    assert found_in(body, "kernels/x.py") == []
