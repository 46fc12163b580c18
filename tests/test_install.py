"""What an editable install makes of ``import hiserve``, wherever Python is started."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
IMPORT = "import site, sys; site.addsitedir(sys.argv[1]); import hiserve; print(hiserve.__file__)"


def run(*arguments: object, cwd: Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_every_file_of_the_package_is_installed() -> None:
    """An image has the package as it is installed, and no checkout."""
    package = ROOT / "hiserve"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["hiserve"]
    installed = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files - installed == set() and len(files) > 10


def test_the_folder_that_holds_the_clone_imports_the_package_and_not_the_clone(tmp_path: Path) -> None:
    """There, the clone's own folder ``hiserve`` looks like a package without code, which must not be found first."""
    clone, built, installed = tmp_path / "hiserve", tmp_path / "built", tmp_path / "site"
    for name in ("pyproject.toml", "README.md", "LICENSE", "hiserve/__init__.py", "hiserve/models/nano/ATTRIBUTION.md"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    for name in ("hiserve/bench/datasets/ATTRIBUTION.md", "hiserve/server/dashboard/uPlot.LICENSE"):
        (clone / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, clone / name)
    (clone / "hiserve" / "__init__.py").write_text("")  # the real one needs the other packages
    built.mkdir()
    run("-c", BUILD, built, cwd=clone)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for cwd in (tmp_path, clone, built):  # without -S and -E, this machine's own install would be found
        assert run("-S", "-E", "-c", IMPORT, installed, cwd=cwd) == str(clone / "hiserve" / "__init__.py")
