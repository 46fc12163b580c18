"""The example of Prometheus and Grafana: its files parse, fit together, and name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hiserve.ipc.cache_stats import CacheStats, CopyStats
from hiserve.ipc.messages import WorkerStats
from tests.unit.server.conftest import Server

FOLDER = Path(__file__).parents[3] / "examples" / "monitoring"
BOARD = FOLDER / "grafana" / "dashboards" / "hiserve.json"
NAME = re.compile(r"\b(?:hiserve:|process_)\w+")
SUFFIXES = ("_bucket", "_sum", "_count")


def read(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return dict(json.loads(BOARD.read_text()))


async def shown(server: Server) -> set[str]:
    """All series names that ``/metrics`` shows after one good and one bad request, and copies that failed."""
    failed = CopyStats(num_wanted=1, unfulfilled={"broken": 1})
    server.engine.stats = WorkerStats(
        cache=CacheStats(loads=failed, misses={"cold": 1}), step_faults={"out_of_memory": 1}
    )
    await server.chat("Hi")
    await server.chat("Hi", temperature=-1)
    lines = (await server.get("/metrics")).text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


async def test_every_metric_of_the_board_exists(server: Server, board: dict[str, Any]) -> None:
    names = {name for panel in board["panels"] for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert len(names) > 15
    assert names - await shown(server) == set()


async def test_every_metric_of_the_readme_exists(server: Server) -> None:
    names = set(NAME.findall((FOLDER / "README.md").read_text()))
    families = await shown(server)
    assert names
    assert {name for name in names if not families & {name, *(name + suffix for suffix in SUFFIXES)}} == set()


async def test_the_labels_that_the_board_asks_for_exist(server: Server, board: dict[str, Any]) -> None:
    await shown(server)
    text = (await server.get("/metrics")).text
    for panel in board["panels"]:
        for target in panel["targets"]:
            for name, labels in re.findall(r"(hiserve:\w+)\{([^}]*)\}", target["expr"]):
                series = next(line for line in text.splitlines() if line.startswith(name + "{"))
                grouped = [
                    label for by in re.findall(r"sum by \(([\w, ]+)\)", target["expr"]) for label in by.split(", ")
                ]
                wanted = re.findall(r"(\w+)=~?\"", labels) + grouped
                assert all(f'{label}="' in series for label in wanted), (series, wanted)


def test_the_panels_answer_the_questions_and_do_not_overlap(board: dict[str, Any]) -> None:
    text = json.dumps(board["panels"])
    for wanted in ("time_to_first_token", "inter_token", "e2e_request", "request_success", "kv_cache_usage"):
        assert wanted in text
    for wanted in ("cache_pages", "cache_fulfilled", "cache_unfulfilled", "kv_offload", "cache_misses"):
        assert wanted in text
    for wanted in ("prefix_cache_hits", "queue_time", "generation_tokens", "http_responses"):
        assert wanted in text
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_files_fit_together(board: dict[str, Any]) -> None:
    services = read("docker-compose.yaml")["services"]
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (job,) = read("prometheus.yaml")["scrape_configs"]
    assert job["job_name"] == "hiserve"
    (provider,) = read("grafana/provisioning/dashboards/hiserve.yaml")["providers"]
    mounts = [mount.split(":") for service in services.values() for mount in service["volumes"]]
    assert provider["options"]["path"] in {inside for _, inside, *_ in mounts}
    for outside, *_ in mounts:
        assert not outside.startswith("./") or (FOLDER / outside).exists()
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
