"""Writes hiserve-nano and its draft heads as a model of a built-in shape, from which ``hiserve`` starts as from any other.

Usage: ``python -m benchmarks.widen SHAPE OUT [--head KIND=FOLDER ...]``: the model in ``OUT``, each head in ``OUT/KIND``,
where ``--spec KIND`` finds it; all made tensor by tensor on the device from a seed. Heads that come with the narrow model
need not be named. ``--plan`` says how large everything is and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.widen.heads import bundled_heads, widen_head, write_head
from benchmarks.widen.plan import plan_head, plan_target
from benchmarks.widen.target import widen, write
from hiserve.config.options import DTYPE_BYTES
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.model_config import NANO, find_model


def main() -> None:
    """Prints the plan, and writes what it says."""
    given = arguments()
    widened = widen(find_model(given.model), SHAPES[given.shape], given.seed)
    folders = bundled_heads(widened.folder) | {kind: Path(folder) for kind, folder in given.head}
    heads = {kind: widen_head(widened, folder) for kind, folder in folders.items()}
    element = DTYPE_BYTES[given.dtype]
    print("\n".join(plan_target(widened, element) + [plan_head(kind, head, element) for kind, head in heads.items()]))
    if given.plan:
        return
    dtype, device = getattr(torch, given.dtype), torch.device(given.device)
    write(widened, dtype, device, given.out)
    for kind, head in heads.items():
        write_head(widened, head, dtype, device, given.out / kind)
    print(f"seed {given.seed}: {given.out}")


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.widen", description=main.__doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=NANO, help="what is widened")
    parser.add_argument(
        "--head", action="append", default=[], type=lambda pair: pair.split("=", 1), metavar="KIND=FOLDER"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float64"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", action="store_true", help="only say how large it is")
    return parser.parse_args()


if __name__ == "__main__":
    main()
