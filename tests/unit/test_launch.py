"""Options become settings on this machine; every way to run a model begins so."""

from __future__ import annotations

import os

import pytest

from hiserve.cache.storage.host_segment import open_segment
from hiserve.cache.storage.inventory import delete_named_cache
from hiserve.cache.storage.segment import Segment
from hiserve.config.options import make_options
from hiserve.core.machine import GIB, Machine
from hiserve.launch import prepare
from tests.helpers.settings import identified

MACHINE = Machine(cores=2, memory_bytes=8 * GIB, cuda_memory_bytes=(), shm_bytes=GIB)


def test_the_segment_that_a_former_server_left_counts_as_memory_and_that_of_a_group_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"launch-{os.getpid()}"
    before = prepare(make_options(host_cache_name=name, host_cache_gib=4 / 1024), MACHINE)
    assert before.machine == MACHINE
    try:
        segment = open_segment(identified(before.resolved.settings), 0)
        assert segment is not None
        num_bytes = segment.layout.num_pages * segment.layout.page_bytes
        segment.close()
        after = prepare(make_options(host_cache_name=name), MACHINE)
        Segment.named(f"{name}-1-of-2", segment.layout).close()
        after.log()
    finally:
        delete_named_cache(name)
    assert after.machine.kept_bytes == num_bytes
    assert after.resolved.settings.cache.host_cache_gib == num_bytes / GIB
    assert f"hiserve cache delete {name}-1-of-2" in caplog.text
