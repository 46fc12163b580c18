"""Nothing on the hot path waits for the device or depends on its data, but where a reason is given."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import hiserve
import tools.graph_lint.__main__ as graph_lint
from tools.graph_lint.allowed import ALLOWED
from tools.graph_lint.scan import HOT_ROOMS, PATTERNS, Allowed, scan, scan_source

PACKAGE = Path(hiserve.__file__).parent

CAUGHT = [
    (".item()", "x.item()"),
    (".item()", "return self.counts[0].item()"),
    (".tolist()", "for row in rows.lengths.tolist(): pass"),
    (".cpu()", "y = x.cpu()"),
    (".numpy()", "y = self.table.numpy()"),
    ('.to("cpu")', 'y = x.to("cpu", non_blocking=True)'),
    ('.to("cpu")', 'y = x.to(device="cpu")'),
    ('.to("cpu")', 'y = x.to(torch.device("cpu"))'),
    ("synchronize", "torch.cuda.synchronize()"),
    ("synchronize", "torch.cuda.current_stream().synchronize()"),
    ("torch.equal", "return torch.equal(x, x)"),
    ("int(tensor)", "n = int(x.max())"),
    ("int(tensor)", "n = float((x * 2)[0])"),
    ("if tensor", "if x.any(): pass"),
    ("if tensor", "if n > 3 and not (x > 0).all(): pass"),
    ("if tensor", "while torch.isnan(x): pass"),
    ("if tensor", "assert x.min() >= 0"),
    ("if tensor", "n = 1 if x[0] > 2 else 3"),
    ("if tensor", "n = [row for row in range(n) if x[row] > 0]"),
    ("if tensor", "y = torch.sin(x)\nif y.sum(): pass"),
    ("if tensor", "if n > 3 and x.any(): pass"),
    ("if tensor", "return x.any() or n > 3"),
    ("if tensor", "y = not x.any()"),
    ("nonzero", "y = x.nonzero()"),
    ("nonzero", "y = torch.nonzero(x)"),
    ("nonzero", "y = torch.where(x > 0)"),
    ("nonzero", "y = torch.masked_select(x, x > 0)"),
    ("nonzero", "y = torch.unique(x)"),
    ("mask index", "y = x[x > 0]"),
    ("mask index", "mask = (x > 0) & (x < 9)\ny = x[:, ~mask]"),
    ("mask index", "x[torch.isnan(x)] = 0"),
    ("bincount", "y = torch.bincount(x)"),
    ("text of tensor", 'y = f"{x.sum()} of {n}"'),
    ("slice by tensor", "y = x[: x.max()]"),
    ("iteration", "for each in x: pass"),
    ("repeat_interleave", "y = torch.repeat_interleave(x, x)"),
    ("value into tensor", "x[0] = n"),
    ("allocation", "y = torch.zeros((n, 4), device=x.device)"),
    ("tensor of values", "y = torch.tensor([1, 2])"),
    ("tensor of values", "y = torch.as_tensor(sizes, device=x.device)"),
    ("tensor of values", "y = x.new_tensor([n])"),
]

HARMLESS = """
y = torch.where(x > 0, x, 0)
z = x[y] + x[:, None, 2] + x[0, n:]
if x.shape[0] > 2 and x.dtype == torch.float32 and x is not None and optional is None:
    pass
if n > 3 and torch.cuda.is_available() and plan.samples.all():
    pass
n = int(plan.max_len.max()) + int(x.size(0)) + len(x)
y = x.to(torch.float32).masked_fill(x > 0, 0)
y = n > 3 and x.max()
event.record()
"""


def in_function(body: str) -> str:
    return "def f(x: Tensor, n: int, optional: torch.Tensor | None) -> None:\n" + textwrap.indent(body, "    ")


def test_the_hot_path_has_nothing_that_breaks_a_graph() -> None:
    found = scan(PACKAGE, ALLOWED)
    told = [f"{each.file}:{each.line} {each.function}: {each.pattern}: {each.text}" for each in found.violations]
    assert not told, "\n".join(
        ["move it off the hot path, or say in tools/graph_lint/allowed.py why it may stay:", *told]
    )
    assert not found.idle, f"these exceptions cover nothing any more; take them out: {found.idle}"
    assert all(each.file.startswith(HOT_ROOMS) for each in found.excused)


def test_the_command_prints_what_is_wrong_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "x.py").write_text("def f(x):\n    x.add_(1)\n")
    monkeypatch.setattr(graph_lint, "PACKAGE", tmp_path)
    monkeypatch.setattr(graph_lint, "ALLOWED", [])
    assert graph_lint.main() == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "models" / "x.py").write_text("def f(x):\n    x.item()\n")
    monkeypatch.setattr(graph_lint, "ALLOWED", [Allowed("models/x.py", "h", "*", "of nothing")])
    assert graph_lint.main() == 1
    told = capsys.readouterr().out
    assert "models/x.py:2: f: .item() waits for the device" in told and "models/x.py h no longer needs *" in told


def test_every_exception_has_a_reason_and_names_a_file_and_a_pattern() -> None:
    for each in ALLOWED:
        assert (PACKAGE / each.file).is_file(), each
        assert each.pattern in ("*", *PATTERNS), each
        assert re.search(r"\w \w", each.reason), each


@pytest.mark.parametrize(("pattern", "body"), CAUGHT)
def test_each_pattern_is_caught(pattern: str, body: str) -> None:
    found = scan_source(in_function(body), "runners/x.py")
    assert [(each.function, each.pattern) for each in found] == [("f", pattern)]
    assert found[0].line == 1 + len(body.splitlines())


def test_every_pattern_has_a_snippet() -> None:
    assert {pattern for pattern, _ in CAUGHT} == set(PATTERNS)


def test_what_does_no_harm_is_not_caught() -> None:
    assert scan_source(in_function(HARMLESS), "runners/x.py") == []


def test_findings_name_the_innermost_function_and_kernels_are_left_out() -> None:
    source = """
    y = x.item()
    class A:
        def f(self):
            def inner():
                return x.item()
            return lambda: x.cpu()
        @torch.inference_mode()
        def g(self):
            return x.tolist()
    @triton.jit
    def kernel(x: Tensor):
        if x > 0:
            x.item()
    @triton.jit(do_not_specialize=["n"])
    def other(x):
        x.item()
    """
    found = [(each.function, each.pattern) for each in scan_source(textwrap.dedent(source), "kernels/x.py")]
    assert found == [("<module>", ".item()"), ("A.f.inner", ".item()"), ("A.f", ".cpu()"), ("A.g", ".tolist()")]


def test_an_exception_covers_its_function_and_pattern_alone_and_is_told_when_it_covers_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "x.py").write_text("def f(x):\n    x.cpu()\n    x.item()\ndef g(x):\n    x.cpu()\n")
    (tmp_path / "worker.py").write_text("x.item()\n")  # not hot
    allowed = [Allowed("models/x.py", "f", ".cpu()", "of a test"), Allowed("models/x.py", "h", "*", "of nothing")]
    found = scan(tmp_path, allowed)
    assert [(each.line, each.function, each.pattern) for each in found.violations] == [
        (3, "f", ".item()"),
        (5, "g", ".cpu()"),
    ]
    assert [each.line for each in found.excused] == [2]
    assert found.idle == allowed[1:]
