"""Engines of several hosts share pages through Valkey: what one computed, another loads; without it they compute."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.cache.storage.resp import Endpoint
from tests.helpers.small_model import small_model
from tests.helpers.tiered import engine_of
from tests.helpers.valkey import command, valkey

PAGE_SIZE, NUM_PROMPT = 16, 200
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "dtype": "float64",
    "page_size": PAGE_SIZE,
    "max_model_len": 256,
    "kv_pages": 60,
    "host_cache_gib": 0.05,
    "max_running_requests": 2,
    "spec": "off",
    "cpu_threads": 1,
    "log_level": "warning",
    "store_prefetch": "wait",
    "drain_timeout_s": 60,
}
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Endpoint]:
    with valkey(tmp_path) as endpoint:
        yield endpoint


def life(model: Path, secret: Path, store: str) -> tuple[list[int], int, int]:
    """One engine: the tokens of a reply, the tokens of the prompt that came from the store, and damaged pages."""
    prompt = np.random.default_rng(5).integers(7, 4096, NUM_PROMPT).tolist()
    with LLM(str(model), store=store, store_secret_file=str(secret), **SETTINGS) as llm:
        (result,) = llm.generate([prompt], SAMPLING)
        cache = engine_of(llm).stats().cache
        assert cache.store is not None
        return result.outputs[0].token_ids, cache.cached_tokens["store"], cache.store.num_corrupt


def test_what_one_engine_computed_another_loads(tmp_path: Path, server: Endpoint) -> None:
    """S14, S15, S17: the other has a copy of the model elsewhere; a third without the secret loads nothing."""
    model = Path(small_model())
    copied = Path(shutil.copytree(model, tmp_path / "elsewhere" / "model"))
    secrets = [tmp_path / name for name in ("secret", "other")]
    for number, secret in enumerate(secrets):
        secret.write_bytes(bytes([number]) * 32)
        secret.chmod(0o600)
    store = f"valkey://{server.name}"
    tokens, num_stored, _ = life(model, secrets[0], store)
    assert num_stored == 0
    num_pages = NUM_PROMPT // PAGE_SIZE
    assert command(server, b"DBSIZE") >= num_pages
    assert life(copied, secrets[0], store) == (tokens, num_pages * PAGE_SIZE, 0)
    assert life(model, secrets[1], store) == (tokens, 0, 0)


def test_an_engine_without_its_store_computes(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    tokens, num_stored, _ = life(Path(small_model()), secret, "valkey://127.0.0.1:1")
    assert (len(tokens), num_stored) == (8, 0)
