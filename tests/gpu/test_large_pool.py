"""A pool whose planes have more elements than 32 bits count: the same tokens as in a small one, from pages on either side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.cuda import MAX_LEN, PAGE, decisions, prompts_of, run_all
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner
from tests.helpers.scripted import verify

pytestmark = pytest.mark.gpu

HEAD_DIM, NUM_LAYERS, NUM_NEW, WIDTH = 128, 2, 24, 4
SMALL, LARGE = 600, 1_000_000  # pages
LENGTHS = [17, 33, 70, 129, 5, 64, 63, 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads are those for which the contract's tests have compiled FlashInfer's kernels."""
    folder = tmp_path_factory.mktemp("llama")
    return save_llama(folder, head_dim=HEAD_DIM, num_hidden_layers=NUM_LAYERS)


@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_tokens_do_not_depend_on_how_far_apart_pages_lie(folder: Path, attention: str, graphs: str) -> None:
    """33 GB of a device. Prompts in chunks, decode and verify steps."""
    prompts, said, drafted = prompts_of(LENGTHS, seed=4, vocab=320), [], []
    for num_pages in (SMALL, LARGE):
        subject = Engine(
            folder,
            dtype="bfloat16",
            device="cuda",
            attention=attention,
            graphs=graphs,
            num_pages=num_pages,
            max_len=MAX_LEN,
            max_rows=8,
            max_batched_tokens=256,
            widths=(1, WIDTH) if graphs == "all" else (1,),
        )
        plane = subject.pool.layers("kv")[0].k
        assert (plane.numel() > 2**31) == (num_pages == LARGE), plane.shape
        planner = HandPlanner(PAGE, num_pages, shuffle_seed=1)
        for row, prompt in prompts.items():
            planner.admit(row, prompt)
        plans = []
        while left := {row: todo for row, each in prompts.items() if (todo := len(each) - planner.computed[row]) > 0}:
            plans.append(planner.step({row: min(100, todo) for row, todo in list(left.items())[:2]}))
        plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(NUM_NEW - 1)]
        pages = [page for own in planner.pages.values() for page in own]
        beyond = [page for page in pages if page * PAGE * plane[0].numel() >= 2**31]
        assert num_pages == SMALL or 0 < len(beyond) < len(pages)
        said.append(run_all(subject, plans))
        if graphs == "all":
            assert decisions(subject)["replay/decode"] == NUM_NEW - 1
            # Here pages are handed out in ascending order: of the large pool's last ones, whose order is turned.
            drafted.append(verify(subject, prompts, said[0], WIDTH))
            # FlashInfer verifies by another kernel than it decodes by, whose ties in bfloat16 may fall otherwise.
            assert attention == "flashinfer" or drafted[-1] == said[-1]
        subject.executor.close()
        del subject, plane
        torch.cuda.empty_cache()
    assert said[0] == said[1]
    assert len(drafted) == (2 if graphs == "all" else 0) and drafted[:1] == drafted[1:]
