"""The import path of a program that is started in another tree."""

from __future__ import annotations

import os
from pathlib import Path


def import_path(*folders: Path) -> str:
    """Returns a value of ``PYTHONPATH``: these folders, then those of this process, which may find its packages there."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))
