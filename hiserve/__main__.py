"""The command ``hiserve``, also ``python -m hiserve``: Ctrl-C ends it without a traceback from its first moment."""

import importlib
import sys

INTERRUPTED = 130


def main() -> int:
    """Runs the command line; returns the exit code."""
    try:
        code: int = importlib.import_module("hiserve.cli").main()
    except KeyboardInterrupt:  # during the imports; later ``cli.main`` handles it
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
