"""Which segment a configuration gets, and what is known of it before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hiserve.cache.storage import inventory
from hiserve.cache.storage.cache_identity import server_secret
from hiserve.cache.storage.host_segment import layout_of, probe_segments, remarks_on_parts
from hiserve.cache.storage.host_segment import open_segment as open_identified
from hiserve.cache.storage.segment import SHARED_MEMORY, PageLayout, Segment
from hiserve.config.options import Options, make_options
from hiserve.core.machine import GIB, Machine
from hiserve.errors import ConfigError, ResourceError
from hiserve.models.builtin_shapes import read_model
from tests.helpers.host import make_layout
from tests.helpers.settings import identified, namespace_of

MIB = 2**20
MACHINE = Machine(cores=2, memory_bytes=8 * GIB, cuda_memory_bytes=(), shm_bytes=GIB)
_, MODEL = read_model(make_options().model)


def config(**settings: Any) -> Options:
    return make_options(**({"dtype": "float32", "host_cache_gib": 4 / 1024} | settings))


def open_segment(given: Options, replica: int, directory: Path = SHARED_MEMORY) -> Segment | None:
    return open_identified(identified(given, directory), replica, directory)


def test_the_layout_is_that_of_the_pages_of_the_model() -> None:
    layout = layout_of(identified(config(page_size=8, spec="off")))
    assert layout is not None
    assert layout.page_size == 8
    assert layout.page_bytes == PageLayout(MODEL.kv_groups("float32"), 8).page_bytes
    assert layout.num_pages == 4 * MIB // layout.page_bytes
    assert layout.namespace == namespace_of(config(page_size=8, spec="off"))


@pytest.mark.parametrize("gib", [0.0, 1e-5])
def test_no_room_for_two_pages_is_no_segment(gib: float) -> None:
    settings = identified(config())
    small = identified(replace(settings, cache=replace(settings.cache, host_cache_gib=gib)))
    assert layout_of(small) is None
    assert open_identified(small, 0) is None


def test_each_replica_has_a_file_of_its_own(tmp_path: Path) -> None:
    both = config(host_cache_name="n", replicas=2)
    for replica in range(2):
        segment = open_segment(both, replica, tmp_path)
        assert segment is not None
        segment.close()
    alone = open_segment(config(host_cache_name="n"), 0, tmp_path)
    assert alone is not None
    alone.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"hiserve-n-0", "hiserve-n-1", "hiserve-n", ".hiserve-n.secret"}


def test_digests_know_the_secret_of_a_name_and_nothing_else_has_one(tmp_path: Path) -> None:
    assert server_secret(config(), tmp_path) == b""
    named = config(host_cache_name="n")
    digest = namespace_of(named, tmp_path)
    assert namespace_of(named, tmp_path) == digest
    assert (tmp_path / ".hiserve-n.secret").stat().st_mode & 0o777 == 0o600
    assert len({digest, namespace_of(config(), tmp_path)}) == 2
    (tmp_path / ".hiserve-n.secret").unlink()
    assert namespace_of(named, tmp_path) != digest


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"load_format": "dummy"}, {"page_size": 4}])
def test_what_changes_the_bytes_of_a_page_changes_its_namespace(change: dict[str, Any]) -> None:
    assert namespace_of(config(**change)) != namespace_of(config())


def test_a_segment_that_is_there_keeps_its_size_and_counts_as_room(tmp_path: Path) -> None:
    named = config(host_cache_name="n")
    assert probe_segments(named, MACHINE, tmp_path) == MACHINE
    segment = open_segment(named, 0, tmp_path)
    assert segment is not None
    pages = segment.layout.num_pages * segment.layout.page_bytes
    segment.pages[:] = 1
    found = probe_segments(config(host_cache_name="n", host_cache_gib="auto"), MACHINE, tmp_path)
    taken = found.shm_bytes - MACHINE.shm_bytes
    assert taken >= pages
    assert found == msgspec.structs.replace(
        MACHINE, kept_bytes=pages, shm_bytes=GIB + taken, memory_bytes=8 * GIB + taken
    )
    segment.close()


def test_nothing_is_looked_for_without_a_name(tmp_path: Path) -> None:
    assert probe_segments(config(), MACHINE, tmp_path) == MACHINE
    with pytest.raises(ConfigError, match="--host-cache-name is 'a/b'"):
        probe_segments(config(host_cache_name="a/b"), MACHINE, tmp_path)


@pytest.mark.parametrize("change", [{"kv_canary": True}, {"store": "made"}, {"dtype": "bfloat16"}])
def test_a_name_whose_digests_know_another_secret_is_refused_with_what_can_have_changed(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    given = {"host_cache_name": "n"}
    segment = open_segment(config(**given), 0, tmp_path)
    assert segment is not None
    segment.close()
    if "store" in change:
        change = {"store": f"file:{tmp_path / 'store'}"}
    with pytest.raises(
        ConfigError, match="or another --dtype, --state-dtype, --kv-dtype, --store or --kv-canary; it was left alone"
    ) as caught:
        open_segment(config(**given | change), 0, tmp_path)
    assert caught.value.param == "host_cache_name"
    segment = open_segment(config(**given), 0, tmp_path)
    assert segment is not None, "what was there is of use again"
    segment.close()


def test_a_name_has_one_owner(tmp_path: Path) -> None:
    segment = open_segment(config(host_cache_name="n"), 0, tmp_path)
    assert segment is not None
    with pytest.raises(ResourceError, match="another server uses"):
        open_segment(config(host_cache_name="n"), 0, tmp_path)
    segment.close()


def test_parts_of_groups_of_another_size_are_told_with_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remarks_on_parts(config(), tmp_path) == remarks_on_parts(config(host_cache_name="n"), tmp_path) == []
    for name in ("n", "n-1-of-2", "n-1-of-3", "n-2-of-3", "n-1", "other-1-of-2"):
        Segment.named(name, make_layout(), tmp_path).close()
    (line,) = remarks_on_parts(config(host_cache_name="n", tp=2), tmp_path)
    assert "n-1-of-3 (" in line and "GiB)" in line and line.endswith("hiserve cache delete n-1-of-3 n-2-of-3")
    used = Segment.named("n-2-of-3", make_layout(), tmp_path)
    (line,) = remarks_on_parts(config(host_cache_name="n"), tmp_path)
    assert line.endswith("hiserve cache delete n-1-of-2 n-1-of-3")
    used.close()
    (tmp_path / "hiserve-n-1-of-4").write_text("something else")
    tried: list[str] = []
    monkeypatch.setattr(inventory, "_is_locked", lambda path: tried.append(path.name))
    assert "n-1-of-4" not in remarks_on_parts(config(host_cache_name="n"), tmp_path)[0]
    # The server of another cache may start at this moment: it finds its lock free.
    assert tried == ["hiserve-n-1-of-2", "hiserve-n-1-of-3", "hiserve-n-2-of-3"]


def test_a_part_that_is_removed_while_it_is_looked_at_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, _: [folder / "hiserve-n-1-of-2"])
    assert remarks_on_parts(config(host_cache_name="n"), tmp_path) == []
