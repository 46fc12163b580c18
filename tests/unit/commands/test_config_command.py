"""``hiserve config`` itemises memory where it is: on the device and beside it."""

from __future__ import annotations

import pytest

from hiserve import cli
from hiserve.commands import config as command
from hiserve.config.options import flags, make_options
from hiserve.core.machine import GIB, Machine

HOST = Machine(cores=4, memory_bytes=16 * GIB, cuda_memory_bytes=())
DEVICE = Machine(cores=4, memory_bytes=16 * GIB, cuda_memory_bytes=(80 * GIB,))


def sums(text: str) -> list[dict[str, float]]:
    """Reads the tables of memory: item to GiB."""
    tables: list[dict[str, float]] = []
    for line in text.splitlines():
        if "memory of one worker" in line:
            tables.append({})
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if tables and len(cells) == 2:
            tables[-1][cells[0]] = float(cells[1])
    return tables


@pytest.mark.parametrize(("machine", "num_tables"), [(HOST, 1), (DEVICE, 2)])
def test_every_sum_is_that_of_its_items(
    machine: Machine, num_tables: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "probe", lambda: machine)
    assert command.run(make_options()) == 0
    tables = sums(capsys.readouterr().out)
    assert len(tables) == num_tables
    assert tables[-1]["host cache"] == (0.25 if num_tables == 1 else 8.0)
    assert tables[-1]["available"] == 16
    if num_tables == 2:
        assert "host cache" not in tables[0]
        assert tables[0]["available"] == 80
    for table in tables:
        total = table.pop("total")
        del table["available"]
        assert total == pytest.approx(sum(table.values()), abs=0.003)


def test_what_is_not_given_is_empty_and_keys_are_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "probe", lambda: HOST)
    assert command.run(make_options(api_key=("k3y",), admin_api_key=None)) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    cells = {row[1]: row[2:4] for row in rows if len(row) == 6}
    assert cells["--api-key"] == ["(hidden)", "(hidden)"] and "k3y" not in out
    assert cells["--admin-api-key"] == cells["--store"] == ["", ""]
    assert cells["--page-size"] == ["auto", "16"]


def test_every_flag_that_is_shown_exists(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "probe", lambda: HOST)
    monkeypatch.setenv("COLUMNS", "80")
    assert command.run(make_options()) == 0
    out = capsys.readouterr().out
    shown = {word for line in out.splitlines() for word in line.split() if word.startswith("--")}
    (serve,) = [
        action.choices["serve"] for action in cli.make_parser("serve")._actions if isinstance(action.choices, dict)
    ]
    accepted = {flag for action in serve._actions for flag in action.option_strings}
    assert shown <= accepted, sorted(shown - accepted)
    assert len(shown) == len(flags()) - 1, "every setting but the model has a flag, none is cut"
