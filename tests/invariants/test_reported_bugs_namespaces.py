"""Reported bugs of sizes, layouts and namespaces as test cases, by number; pools and index together, without an engine.

- TC-60 (a page across two registrations): ``tests/unit/storage/test_prefault.py``.
- TC-61 (another page size): below of segments, ``tests/contract/test_page_store.py`` of stores.
- TC-62 (prompts around whole pages) and TC-70 (tenants): ``test_reported_bugs_index.py``.
- TC-63 (a partial prefetch with sidecar pools): does not apply; a page is one piece with everything that moves
  together, so no part of a prefix can be shorter than another.
- TC-64 (limits of control groups, small /dev/shm): below, ``tests/unit/core/test_machine.py`` and
  ``tests/unit/storage/test_segment.py``.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.storage.cache_identity import cache_namespace, stamps, weight_digests
from hiserve.cache.storage.file_store import FileStore
from hiserve.cache.storage.records import Records
from hiserve.cache.storage.segment import Segment
from hiserve.cache.storage.store import store_key
from hiserve.config.options import make_options
from hiserve.core.digest import chain, namespace_digest, pack_tokens, strong_chain
from hiserve.core.machine import probe
from hiserve.core.resolve import resolve
from hiserve.core.step_memory import ModelFacts, StepShape
from hiserve.core.transfers import PageRun
from hiserve.errors import ConfigError, ResourceError
from tests.helpers.host import PAGE_BYTES, make_layout, store

PAGE_SIZE = 4
TENANT = b"tenant"
GIB = 2**30
NANO = ModelFacts(
    context_length=8192,
    checkpoint_dtype="bfloat16",
    num_params=7_344_384,
    slot_elements=2048,
    step=StepShape(
        num_layers=8, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_elements=2304, vocab_size=4096
    ),
)
KEY = pack_tokens(np.arange(12, dtype=np.int32))
PROMPT = KEY + bytes(4)


@dataclass(frozen=True)
class Model:
    """What tells caches apart."""

    folder: Path
    dtype: str = "bfloat16"
    load_format: str = "auto"
    page_size: int = PAGE_SIZE

    @property
    def namespace(self) -> bytes:
        drawn = [b"drawn"] if self.load_format == "dummy" else weight_digests(stamps({self.folder: "model"}))
        return cache_namespace(b"shape", drawn, dtype=self.dtype, page_size=self.page_size)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return Model(folder)


def new_cache(namespace: bytes) -> PrefixCache:
    return PrefixCache(num_pages=20, page_size=PAGE_SIZE, namespace=namespace, num_host_pages=20)


def keys_of(root: bytes) -> list[bytes]:
    return [store_key(digest) for digest in strong_chain(root, KEY, PAGE_SIZE)]


def leave_pages(namespace: bytes, records: Records, pages: np.ndarray, files: FileStore) -> None:
    """A former process leaves three pages in the segment and in the store."""
    root = namespace_digest(namespace, TENANT)
    numbers = np.array([1, 2, 3], dtype=np.int32)
    store(records, pages, PageRun(numbers, root, root, chain(root, KEY, PAGE_SIZE), KEY))
    assert files.put(keys_of(root), [memoryview(bytes(PAGE_BYTES))] * 3) == 3


def found(namespace: bytes, records: Records, files: FileStore) -> tuple[int, int]:
    """Returns the pages of the prompt that a process with this namespace finds on the host, and in the store."""
    cache = new_cache(namespace)
    cache.recover(records.recover())
    root = namespace_digest(namespace, TENANT)
    match = cache.match(TENANT, PROMPT)
    return match.num_host_tokens // PAGE_SIZE, files.exists(keys_of(root))


def check_stranger(old: bytes, new: bytes, tmp_path: Path) -> None:
    segment = Segment.anonymous(make_layout(20))
    records, files = Records(segment.records, PAGE_SIZE), FileStore(tmp_path / "store", 1 << 20)
    leave_pages(old, records, segment.pages, files)
    assert found(old, records, files) == (3, 3)
    assert found(new, records, files) == (0, 0), "pages of another model were found"
    files.close()
    segment.close()


@pytest.mark.parametrize("how", ["written again", "of another size", "more files"])
def test_tc_71_pages_of_old_weights_are_found_on_no_tier(how: str, model: Model, tmp_path: Path) -> None:
    old, weights = model.namespace, model.folder / "model.safetensors"
    if how == "written again":
        status = weights.stat()
        weights.write_bytes(b"WEIGHTS")
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif how == "of another size":
        weights.write_bytes(b"more weights")
    else:
        weights.rename(model.folder / "a.safetensors")
        (model.folder / "b.safetensors").write_bytes(b"")
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (model.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_stranger(old, model.namespace, tmp_path)


def test_tc_71_pages_are_found_by_a_copy_of_the_weights_elsewhere_and_later(model: Model, tmp_path: Path) -> None:
    copy = replace(model, folder=tmp_path / "elsewhere")
    shutil.copytree(model.folder, copy.folder)
    os.utime(copy.folder / "model.safetensors", ns=(1, 1))
    assert copy.namespace == model.namespace


@pytest.mark.parametrize("other", [{"dtype": "float16"}, {"page_size": 8}, {"load_format": "dummy"}], ids=str)
def test_tc_72_another_dtype_layout_or_shard_shares_nothing_of_one_store(
    other: dict[str, str | int], model: Model, tmp_path: Path
) -> None:
    check_stranger(model.namespace, replace(model, **other).namespace, tmp_path)  # type: ignore[arg-type]


def test_tc_61_a_segment_of_another_page_size_is_refused_by_name(tmp_path: Path) -> None:
    Segment.named("pages", make_layout(8, page_size=4), tmp_path).close()
    with pytest.raises(ConfigError, match=r"pages of 4 tokens, not 8 \(--page-size\)") as caught:
        Segment.named("pages", make_layout(8, page_size=8), tmp_path)
    assert caught.value.param == "host_cache_name"
    Segment.named("pages", make_layout(8, page_size=4), tmp_path).close()


@pytest.mark.parametrize(("available_gib", "limit_gib", "shm_gib"), [(64, 4, 64), (4, 64, 64), (64, 64, 0.5)])
def test_tc_64_the_host_cache_fits_the_least_of_memory_control_group_and_dev_shm(
    available_gib: int, limit_gib: int, shm_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What huge pages hold is in MemTotal, and not available."""
    files = {
        "proc/meminfo": f"MemTotal: {GIB} kB\nMemAvailable: {available_gib * GIB // 1024} kB\nHugePages_Total: 99999\n",
        "sys/fs/cgroup/memory.max": str(limit_gib * GIB),
        "sys/fs/cgroup/memory.current": "0",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shm = SimpleNamespace(f_bavail=int(shm_gib * GIB) // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda place: shm)
    machine = msgspec.structs.replace(probe(tmp_path), cuda_memory_bytes=())
    resolved = resolve(make_options(host_cache_name="n", device="cpu"), NANO, machine)
    assert 0 < resolved.memory.parts["host cache"] < min(available_gib, limit_gib, shm_gib) * GIB
    assert sum(resolved.memory.parts.values()) < min(available_gib, limit_gib) * GIB
    least = min(available_gib, limit_gib, shm_gib)
    with pytest.raises(ResourceError, match="--host-cache-gib"):
        resolve(make_options(host_cache_name="n", host_cache_gib=1.1 * least, device="cpu"), NANO, machine)
