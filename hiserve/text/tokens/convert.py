"""Converts tokenizers without a tokenizer.json, such as SentencePiece's, through Hugging Face transformers.

The conversion runs in a child process, so that this process never imports transformers and torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import tokenizers

from hiserve.errors import ModelError

# A large vocabulary takes about a minute.
CONVERT_S = 600.0
SOURCES = ("tokenizer.model", "*.tiktoken", "tekken.json", "vocab.*", "tokenizer_config.json")


def convert(folder: Path) -> tokenizers.Tokenizer:
    """Converts the tokenizer of a model's folder. Code that comes with a model is never run.

    Raises:
        ModelError: The folder has no tokenizer, transformers is not installed, or it cannot convert this tokenizer.
    """
    if not any(path.is_file() for pattern in SOURCES for path in folder.glob(pattern)):
        raise ModelError(f"{str(folder)!r} has no tokenizer.json and no other tokenizer.", param="model")
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{str(folder)!r} has no tokenizer.json; its tokenizer must be converted. "
            "Run: pip install hiserve[hf], or save it in the fast format.",
            param="model",
        )
    with tempfile.TemporaryDirectory(prefix="hiserve-") as made:
        target = Path(made) / "tokenizer.json"
        command = [sys.executable, "-m", __name__, str(folder), str(target)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONVERT_S)
        except subprocess.TimeoutExpired:
            raise ModelError(
                f"the tokenizer in {str(folder)!r} could not be converted in {CONVERT_S:g} s.", param="model"
            ) from None
        if done.returncode or not target.is_file():
            lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
            raise ModelError(
                f"the tokenizer in {str(folder)!r} cannot be converted: {lines[-1][:500]} "
                "Save it in the fast format (tokenizer.json).",
                param="model",
            )
        return tokenizers.Tokenizer.from_file(str(target))


def main(folder: str, target: str) -> None:
    """Converts a tokenizer and saves it. ``convert`` runs this function as a program."""
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise SystemExit(f"{type(tokenizer).__name__} has no fast form.")
    tokenizer.backend_tokenizer.save(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
