"""The slots of a window without the first row, against the twin and by hand, run by Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

PROGRAM = """
import torch
from hiserve.kernels import union_rows, window_slots
from tests.helpers.compressed_cases import Step

torch.set_num_threads(1)
torch.manual_seed(6)
step = Step(cached=(0, 3, 11, 12, 90), new=(3, 1, 2, 1, 4))
for window in (12, 16):
    rows = step.paged(32, 8, 1, window, torch.float32)
    kv_lens = torch.tensor([cached + new for cached, new in zip(step.cached, step.new, strict=True)])
    found, twin = (each.slots_behind_first(rows, kv_lens, step.starts) for each in (window_slots, union_rows))
    assert torch.equal(found, twin)
    whole = union_rows.slots_of(rows)
    first = rows.table[:, 0].long() * 8
    for token, (row, position) in enumerate(zip(rows.token_rows.tolist(), rows.positions.tolist(), strict=True)):
        seen = [slot for slot in whole[token].tolist() if slot != -1]
        hidden = [] if position >= window else [int(first[row])]
        assert [slot for slot in found[token].tolist() if slot != -1] == [slot for slot in seen if slot not in hidden]
        assert len(seen) == min(position + 1, window)
"""


def test_the_first_row_is_hidden_and_no_other() -> None:
    run_interpreted(PROGRAM)
