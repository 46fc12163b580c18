"""Starts a process of torch quickly: ``python -m hiserve.ipc.launcher MODULE ARGUMENT...`` runs ``MODULE.main``.

What is imported stays to the end. Garbage collections would look through it several times while it is imported, again in
each full collection between two steps, and at the end: 0.7 s of CPU in all.
"""

from __future__ import annotations

import gc
import importlib
import sys


def main(module: str, *arguments: str) -> int:
    """Imports a module without garbage collections, keeps what that made out of later ones, and calls its ``main``.

    Args:
        module: Its name.
        arguments: Of its ``main``.

    Returns:
        The exit code, as ``main`` returns it.
    """
    gc.disable()
    run = importlib.import_module(module).main
    gc.freeze()
    gc.enable()
    code: int = run(*arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
