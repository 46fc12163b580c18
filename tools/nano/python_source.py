"""Python for the corpus: the running interpreter's standard library, as files and as small writing tasks."""

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tools.nano.sources import Document, Split, held_out

# Tests, third-party code, generated tables: not the Python that a model should learn from.
EXCLUDED_PARTS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data", "_bundled"})
EXCLUDED_STEMS = ("cp", "mac_", "iso8859", "koi8", "tis_", "ptcp", "hp_", "_sysconfigdata", "big5", "entities", "kz")
MAX_TASK_CHARS = 1800


def stdlib_files() -> list[Path]:
    """Source files of the running interpreter's standard library, sorted, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if EXCLUDED_PARTS.isdisjoint(parts) and not path.stem.startswith(EXCLUDED_STEMS):
            files.append(path)
    return files


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def function_tasks(source: str) -> Iterator[Document]:
    """Yields chats that ask for a documented function of the file and answer with its source."""
    for node in _functions(ast.parse(source)):
        summary = (ast.get_docstring(node) or "").strip().split("\n\n")[0].replace("\n", " ")
        segment = ast.get_source_segment(source, node, padded=True)
        if not summary or segment is None or len(segment) > MAX_TASK_CHARS:
            continue
        code = textwrap.dedent(segment).rstrip()
        names = ", ".join(argument.arg for argument in node.args.args)
        ask = f"Write a Python function {node.name}({names}). {summary}"
        yield Document("pytask", messages=(("user", ask), ("assistant", f"```python\n{code}\n```")))


def load_python() -> tuple[Split, Split]:
    """Reads the standard library.

    Returns:
        The split of whole files (one file in 40 is kept for reporting) and that of the writing tasks, whose training
        part comes from training files alone.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = Split(train=[], early=[], report=[], dropped={"unreadable": 0})
    tasks = Split(train=[], early=[], report=[], dropped={})
    for path in stdlib_files():
        try:
            text = path.read_text(encoding="utf-8")
            chats = list(function_tasks(text))
        except (UnicodeDecodeError, SyntaxError):
            files.dropped["unreadable"] += 1
            continue
        if not text.strip():
            continue
        kept = held_out(path.relative_to(root).as_posix())
        (files.report if kept else files.train).append(Document("python", text=text))
        (tasks.report if kept else tasks.train).extend(chats)
    return files, tasks
