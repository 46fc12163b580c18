"""A restart with an edited model serves nothing that was computed before; a copy of the model serves all of it."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.cache.storage.segment import SHARED_MEMORY
from hiserve.errors import ConfigError
from tests.helpers.small_model import small_model
from tests.helpers.tiered import engine_of
from tests.helpers.widening import some

SETTINGS: dict[str, Any] = {
    "in_process": True,
    "dtype": "float64",
    "page_size": 16,
    "max_model_len": 256,
    "kv_pages": 60,
    "host_cache_gib": 0.05,
    "max_running_requests": 2,
    "max_batched_tokens": 64,
    "spec": "off",
    "cpu_threads": 1,
    "log_level": "warning",
}
SEED = 16
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e5,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i / 4 for i in range(8)],
    "original_max_position_embeddings": 256,
}
EDITS: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 3e3}},
    "norm epsilon": {"rms_norm_eps": 1e-1},
    "window": {"sliding_window": 24},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = Path(shutil.copytree(small_model(), tmp_path / "model"))
    edit(made, {"architectures": ["MistralForCausalLM"], "sliding_window": None})
    return made


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-identity-{os.getpid()}"
    yield name
    gc.collect()
    for path in [*SHARED_MEMORY.glob(f"hiserve-{name}*"), *SHARED_MEMORY.glob(f".hiserve-{name}*")]:
        path.unlink()


def edit(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def life(model: Path, **settings: Any) -> tuple[list[int], int]:
    """One server: the tokens of a reply, and how many tokens of the prompt came from the host or the store."""
    prompt = np.random.default_rng(SEED).integers(7, 4096, 200).tolist()
    with LLM(str(model), **(SETTINGS | settings)) as llm:
        (result,) = llm.generate([prompt], SAMPLING)
        used = engine_of(llm).stats().cache.cached_tokens
        tokens = result.outputs[0].token_ids
    del llm, result
    gc.collect()
    return tokens, used["host"] + used["store"]


def cold(model: Path, **settings: Any) -> list[int]:
    return life(model, host_cache_gib=0, **settings)[0]


@pytest.mark.parametrize("change", some(EDITS, "norm epsilon"))
def test_a_named_host_cache_of_the_model_before_its_edit_is_refused(folder: Path, name: str, change: str) -> None:
    first, _ = life(folder, host_cache_name=name)
    again, cached = life(folder, host_cache_name=name)
    assert again == first
    assert cached == 192
    edit(folder, EDITS[change])
    assert cold(folder) != first, "the edit changes nothing, so the test shows nothing"
    with pytest.raises(ConfigError, match="it was left alone"):
        life(folder, host_cache_name=name)


@pytest.mark.parametrize("change", some(EDITS, "rope_theta", "window"))
def test_a_store_gives_an_edited_model_nothing(folder: Path, tmp_path: Path, change: str) -> None:
    store = {"store": f"file:{tmp_path}/store", "store_prefetch": "wait"}
    first, _ = life(folder, **store)
    assert life(folder, **store) == (first, 192)
    edit(folder, EDITS[change])
    tokens, cached = life(folder, **store)
    assert cached == 0
    assert tokens == cold(folder) != first


def test_longrope_of_another_length_gets_nothing_of_a_store(folder: Path, tmp_path: Path) -> None:
    edit(folder, {"rope_parameters": LONGROPE})
    store = {"store": f"file:{tmp_path}/store", "store_prefetch": "wait"}
    short, _ = life(folder, **store)
    tokens, cached = life(folder, max_model_len=512, **store)
    assert cached == 0
    assert tokens == cold(folder, max_model_len=512) != short


def test_a_copy_of_the_model_elsewhere_is_served_from_the_store(folder: Path, tmp_path: Path) -> None:
    store = {"store": f"file:{tmp_path}/store", "store_prefetch": "wait"}
    first, _ = life(folder, **store)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for path in copy.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    assert life(copy, **store) == (first, 192)
