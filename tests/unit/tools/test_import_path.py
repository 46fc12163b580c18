"""The import path of a program that is started in another tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_path import import_path


def test_folders_come_before_those_of_the_caller_which_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages:/more")
    assert import_path(Path("/watch"), Path("/tree")) == "/watch:/tree:/packages:/more"
    monkeypatch.delenv("PYTHONPATH")
    assert import_path(Path("/tree")) == "/tree", "an empty entry would be the current folder"
