"""Launches that begin early, and the rule that makes them safe."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hiserve.kernels
from hiserve.kernels.launch import early_launch, num_processors

FOLDER = Path(hiserve.kernels.__path__[0])
WEIGHTS = ("weight",)  # parameters that no kernel of a step writes


@pytest.mark.parametrize(
    ("device", "capability", "is_early"),
    [("cpu", (9, 0), False), ("cuda", (8, 9), False), ("cuda", (9, 0), True), ("cuda", (10, 3), True)],
)
def test_kernels_begin_early_where_the_device_can_do_it(
    device: str, capability: tuple[int, int], is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    early_launch.cache_clear()
    try:
        assert early_launch(torch.device(device)) == {"IS_EARLY": is_early, "launch_pdl": is_early}
        assert early_launch(torch.device(device), False) == {"IS_EARLY": False, "launch_pdl": False}
    finally:
        early_launch.cache_clear()


def test_the_processors_of_a_device_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {0: SimpleNamespace(multi_processor_count=78), 1: SimpleNamespace(multi_processor_count=132)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    num_processors.cache_clear()
    try:
        assert [num_processors(torch.device("cuda", index)) for index in (0, 1, 0)] == [78, 132, 78]
        assert num_processors(torch.device("cpu")) > 1
    finally:
        num_processors.cache_clear()


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def early_kernels() -> list[tuple[str, str]]:
    """Returns file and name of each kernel that is told whether it begins early."""
    return [
        (path.name, name)
        for path in sorted(FOLDER.glob("*.py"))
        for name, node in functions(path).items()
        if path.name != "launch.py" and any(argument.arg == "IS_EARLY" for argument in node.args.args)
    ]


def pointer(node: ast.expr, assigned: dict[str, ast.expr]) -> str:
    """Returns the parameter that an address begins with."""
    while not (isinstance(node, ast.Name) and node.id not in assigned):
        assert isinstance(node, ast.Name | ast.BinOp), ast.unparse(node)
        node = assigned[node.id] if isinstance(node, ast.Name) else node.left
    return node.id


@pytest.mark.parametrize(("file", "name"), early_kernels())
def test_a_kernel_that_begins_early_awaits_the_one_before_it_first(file: str, name: str) -> None:
    own = functions(FOLDER / file)
    body = own[name].body
    await_at = [index for index, statement in enumerate(body) if ast.unparse(statement) == "await_previous(IS_EARLY)"]
    assert len(await_at) == 1, "not awaited on every way through"
    assigned: dict[str, ast.expr] = {}
    for statement in body[: await_at[0]]:
        assert isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr), f"{ast.unparse(statement)} before the wait"
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            if called == "tl.load":
                assert pointer(call.args[0], assigned) in WEIGHTS, f"{ast.unparse(call)} before the wait"
            else:
                is_harmless = called == "start_next" or called.endswith(".to") or called.startswith("tl.")
                if called in own:
                    is_harmless = not re.search("tl.(load|store|atomic)", ast.unparse(own[called]))
                assert is_harmless and not called.startswith(("tl.store", "tl.atomic")), f"{called} before the wait"
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            assigned[statement.targets[0].id] = statement.value


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_launches_begin_early_by_one_way_alone(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    found = [call for call in calls if any(keyword.arg == "launch_pdl" for keyword in call.keywords)]
    assert [ast.unparse(call.func) for call in found] == ["EarlyLaunch"] * (path.name == "launch.py")
