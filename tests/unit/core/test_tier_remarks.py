"""What is said of tiers that cannot help, at the start and by the doctor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve import LLM
from hiserve.commands import doctor
from hiserve.config.options import make_options
from hiserve.core.machine import GIB, probe
from hiserve.core.resolve import resolve
from tests.helpers.model_facts import NANO, NANO_HEAD, SERVER

BASE: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_model_len": 100, "kv_pages": 1000}
ROOMY = {"host_cache_gib": 1.0, "store": "file:x"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_cache_gib": 1.0}, ()),
        (ROOMY | {"store_gib": 64.0}, ()),
        ({"host_cache_gib": 0.0}, ()),
        ({"host_cache_gib": 0.004}, ("the host cache can hardly help: it holds",)),
        (ROOMY | {"store_gib": 0.5}, ("the store helps only after a restart: it holds",)),
        (ROOMY | {"store_prefetch_timeout_s": 0.0}, ("no request waits for it",)),
        (
            {"host_cache_gib": 0.004, "store": "file:x", "store_gib": 0.01},
            ("the host cache can hardly help", "the store helps only after a restart"),
        ),
    ],
)
def test_a_tier_that_cannot_help_is_named_with_its_limit_and_remedy(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    found = resolve(make_options(**BASE | settings), NANO, SERVER).remarks
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True)), found


def test_pages_are_as_large_as_drafts_make_them() -> None:
    settings = BASE | {"host_cache_gib": 0.004}
    said = []
    for model, spec in ((NANO, "off"), (msgspec.structs.replace(NANO, draft=NANO_HEAD), "eagle3")):
        resolved = resolve(make_options(**settings, spec=spec), model, SERVER)
        page_bytes = sum(size for name, size in resolved.memory.parts.items() if name.startswith("KV pool")) // 1000
        (line,) = resolved.remarks
        assert f"it holds {int(0.004 * GIB) // page_bytes - 1} pages" in line
        said.append(page_bytes)
    assert said[0] < said[1]


def test_a_store_without_room_for_a_page_is_named() -> None:
    settings = BASE | {"page_size": 512, "max_model_len": 1000, "kv_pages": 10, "host_cache_gib": 1.0}
    (line,) = resolve(make_options(**settings, store="file:x", store_gib=0.001), NANO, SERVER).remarks
    assert line.startswith("the store cannot help: a page takes")


def test_the_start_and_the_doctor_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "kv_pages": 200,
        "max_model_len": 256,
        "host_cache_gib": 0.1,
        "store_gib": 0.001,
        "spec": "off",
    }
    with caplog.at_level(logging.WARNING, "hiserve"):
        LLM(in_process=True, store=f"file:{tmp_path}", log_level="warning", **settings).close()
    assert "the store helps only after a restart" in caplog.text
    found = doctor._model(make_options(store=f"file:{tmp_path}", **settings), probe())
    assert [finding.level for finding in found] == ["ok", "note"]
    assert "the store helps only after a restart" in found[1].text
