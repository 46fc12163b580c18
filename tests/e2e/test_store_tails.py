"""Resume points in a store: a server with an empty host resumes at the deepest, and gives the tokens of one that computes all.

Exact, in float64, of models with windows, with recurrent states, and with windows, compressed rows and rings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.cache.storage import file_store
from hiserve.core.machine import GIB
from hiserve.engine.host_loads import LoadCostModel
from hiserve.llm.outputs import RequestOutput
from hiserve.models.model_config import NANO, find_model
from tests.helpers.compressed_models import save_compressed
from tests.helpers.models import save_family
from tests.helpers.tiered import cache_of, check_whole
from tests.helpers.window_models import VOCAB, save_windows

DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=14, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 160,
    "page_size": 4,
    "kv_pages": 200,
    "host_cache_gib": 0.01,
    "max_running_requests": 4,
    "max_batched_tokens": 24,
    "cpu_threads": 1,
    "spec": "off",
    "store_prefetch": "wait",
    "in_process": True,
    "log_level": "warning",
}


def save_states(folder: Path) -> Path:
    save_family("qwen3_5_text", folder, vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


# How each model is saved, and what it needs beside the settings.
MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "windows": (save_windows, {}),
    "states": (save_states, {}),
    "windows and rings": (
        lambda folder: save_compressed(folder, vocab_size=VOCAB),
        {"page_size": 16, "max_batched_tokens": 64},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {name: save(tmp_path_factory.mktemp(name.split()[-1])) for name, (save, _) in MODELS.items()}


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is loaded, however slow the machine is now."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)


def prompts_of(count: int = 3) -> list[list[int]]:
    """Prompts that share beginnings, one on a boundary of a page."""
    rng = np.random.default_rng(3)
    base = rng.integers(7, VOCAB, 48).tolist()
    return [
        base[:length] + rng.integers(7, VOCAB, more).tolist() for length, more in ((0, 41), (29, 20), (48, 33))[:count]
    ]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def next_turns(first: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *reply, 8, 9] for prompt, reply in zip(prompts_of(len(first)), first, strict=True)]


def options_of(name: str, folders: dict[str, Path], **more: Any) -> dict[str, Any]:
    return SETTINGS | MODELS[name][1] | {"model": str(folders[name])} | more


@lru_cache
def expected_of(name: str, folder: Path, count: int = 3) -> tuple[list[list[int]], list[list[int]]]:
    """First turns and next turns."""
    off = {"disable_prefix_cache": True, "host_cache_gib": 0}
    with LLM(**options_of(name, {name: folder}) | off) as llm:
        first = told(llm.generate(prompts_of(count), DRAWN))
        return first, told(llm.generate(next_turns(first), DRAWN))


def ends_of(prompts: list[list[int]], page_size: int, num_after: int) -> list[int]:
    """The last boundaries before so many tokens at the end of each."""
    return [(len(prompt) - num_after) // page_size * page_size for prompt in prompts]


# The model, settings of both servers, and of the first alone.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "windows": ("windows", {}, {}),
    "pages that more than one request used": ("windows", {"host_admission": "write_through_selective"}, {}),
    "a host of a few tails": ("windows", {"overlap": 1}, {"host_cache_gib": 24 * 2048 / GIB}),
    "states": ("states", {"overlap": 1, "spec": "ngram", "spec_steps": 3}, {}),
    "windows and rings": ("windows and rings", {"overlap": 1}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_server_resumes_at_the_deepest_point_that_the_one_before_it_stored(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """H5 and H10 across servers, of which the store alone is left; some find the history of a tail in their cache."""
    name, both, of_first = CASES[case]
    count = 1 if name == "windows and rings" else 3  # its steps are slow
    prompts = prompts_of(count)
    first, later = expected_of(name, folders[name], count)
    options = options_of(name, folders, store=f"file:{tmp_path}/store", **both)
    with LLM(**options | of_first) as llm:
        assert (cache_of(llm).windows is None) == (name == "states")
        for _ in range(2 if "more than one" in case else 1):
            assert told([llm.generate([prompt], DRAWN)[0] for prompt in prompts]) == first
    with LLM(**options) as llm:
        turns = llm.generate(next_turns(first), DRAWN)
        assert told(turns) == later
        page_size = options["page_size"]
        assert [output.cached.store for output in turns] == ends_of(next_turns(first), page_size, 3)
        again = llm.generate(prompts, DRAWN)
        assert told(again) == first
        assert [output.cached.num_tokens for output in again] == ends_of(prompts, page_size, 1)
        assert sum(output.cached.store for output in again) > 0
        check_whole(llm)


def tails_in(directory: Path) -> list[Path]:
    """The files that are longer than those of pages."""
    files = [path for path in directory.glob("??/*") if path.is_file()]
    size = min(path.stat().st_size for path in files)
    return sorted(path for path in files if path.stat().st_size > size)


def test_tails_that_are_torn_damaged_or_gone_are_misses(folders: dict[str, Path], tmp_path: Path) -> None:
    first, later = expected_of("windows", folders["windows"])
    options = options_of("windows", folders, store=f"file:{tmp_path}/store")
    with LLM(**options) as llm:
        assert told(llm.generate(prompts_of(), DRAWN)) == first
    tails = tails_in(tmp_path / "store")
    assert len(tails) >= 6
    for index, path in enumerate(tails):
        content = path.read_bytes()
        broken = [content[:-1], content[:2112], content[:900] + bytes(8) + content[908:], content + b"\0"][
            index % 5 - 1
        ]
        path.unlink() if index % 5 == 0 else path.write_bytes(broken)
    with LLM(**options) as llm:
        turns = llm.generate(next_turns(first), DRAWN)
        assert told(turns) == later and sum(output.cached.store for output in turns) == 0
        check_whole(llm)
    with LLM(**options) as llm:
        again = llm.generate(next_turns(first), DRAWN)
        assert told(again) == later
        assert [output.cached.store for output in again] == ends_of(next_turns(first), 4, 1)


def test_a_server_that_is_killed_while_it_uploads_leaves_whole_resume_points(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 30 files, of 44 pages and 7 tails, none gets its name."""
    first, later = expected_of("windows", folders["windows"])
    options = options_of("windows", folders, store=f"file:{tmp_path}/store")
    named: list[str] = []
    rename = file_store._replace

    def killed(draft: str, path: str) -> None:
        if len(named) < 30:
            named.append(path)
            rename(draft, path)

    with monkeypatch.context() as patch, LLM(**options) as llm:
        patch.setattr(file_store, "_replace", killed)
        assert told([llm.generate([prompt], DRAWN)[0] for prompt in prompts_of()]) == first
    with LLM(**options) as llm:
        turns = llm.generate(next_turns(first), DRAWN)
        assert told(turns) == later
        ends = ends_of(next_turns(first), 4, 3)
        assert turns[0].cached.store == ends[0] and turns[-1].cached.store < ends[-1]
        check_whole(llm)
