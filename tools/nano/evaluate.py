"""Figures and sample dialogues of an exported model: ``python -m tools.nano.evaluate --model DIR --corpus NPZ``.

Validation documents are packed one after the other, without masks between them, and cut into blocks; a block's first
token is not predicted. Bits a byte count the UTF-8 bytes of the contents alone, and the losses of all tokens.
"""

import argparse
import itertools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.llama import LlamaForCausalLM

from tools.nano.samples import run_samples
from tools.nano.stream import DIALOGUES, Arrays, documents, load_corpus

# Token ids [1, T] to the losses [T - 1] of tokens 1..T-1 in nats.
LossFn = Callable[[Tensor], Tensor]
BUCKETS = (0, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Packed:
    """Validation documents laid end to end.

    Attributes:
        tokens: ``[N]`` int64.
        sources: ``[N]`` int32. The source each token belongs to.
    """

    tokens: np.ndarray
    sources: np.ndarray


def lay_out(items: list[tuple[int, np.ndarray]], order: np.ndarray) -> Packed:
    """Packs documents in the given order."""
    return Packed(
        tokens=np.concatenate([items[i][1] for i in order]),
        sources=np.concatenate([np.full(len(items[i][1]), items[i][0], dtype=np.int32) for i in order]),
    )


def block_losses(loss: LossFn, packed: Packed, block: int, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Loss and place in its block of every token; the loss of a block's first token is NaN."""
    losses = np.full(len(packed.tokens), np.nan)
    for first in range(0, len(packed.tokens) - 1, block):
        ids = torch.from_numpy(packed.tokens[first : first + block])[None].to(device)
        if ids.shape[1] > 1:
            losses[first + 1 : first + ids.shape[1]] = loss(ids).float().cpu().numpy()
    return losses, np.arange(len(losses)) % block


def mean_losses(
    loss: LossFn, corpus: Arrays, part: str, block: int, device: torch.device, names: tuple[str, ...]
) -> dict[str, float]:
    """Nats a token of each of the named sources packed alone."""
    means = {}
    for name in names:
        items = documents(corpus, part, (name,))
        losses, _ = block_losses(loss, lay_out(items, np.arange(len(items))), block, device)
        means[name] = float(np.nanmean(losses))
    return means


def mixed_losses(loss: LossFn, corpus: Arrays, block: int, device: torch.device, orders: int) -> dict[str, object]:
    """Nats a token when coffee and services are shuffled together, over several orders, by source and by place."""
    items = documents(corpus, "report", DIALOGUES)
    losses, sources, places = [], [], []
    for seed in range(orders):
        packed = lay_out(items, np.random.default_rng(seed).permutation(len(items)))
        loss_row, place_row = block_losses(loss, packed, block, device)
        losses.append(loss_row)
        places.append(place_row)
        sources.append(packed.sources)
    all_losses, all_sources, all_places = (np.concatenate(rows) for rows in (losses, sources, places))
    result: dict[str, object] = {}
    for number, name in enumerate(corpus["source_names"]):
        if name in DIALOGUES:
            result[str(name)] = round(float(np.nanmean(all_losses[all_sources == number])), 4)
    result["by_place"] = {
        f"{low}-{high}": round(float(np.nanmean(all_losses[(all_places >= low) & (all_places < high)])), 4)
        for low, high in itertools.pairwise(BUCKETS)
        if low < block
    }
    return result


def source_figures(loss: LossFn, corpus: Arrays, name: str, block: int, device: torch.device) -> dict[str, float]:
    """Nats a token and bits a byte of one source's reported half, packed alone."""
    items = documents(corpus, "report", (name,))
    number = int(np.flatnonzero(corpus["source_names"] == name)[0])
    num_bytes = int(corpus["report_bytes"][corpus["report_sources"] == number].sum())
    packed = lay_out(items, np.arange(len(items)))
    losses, _ = block_losses(loss, packed, block, device)
    nats = float(np.nanmean(losses))
    return {
        "nats_per_token": round(nats, 4),
        "bits_per_byte": round(nats / math.log(2) * len(packed.tokens) / num_bytes, 4),
        "tokens": len(packed.tokens),
        "bytes": num_bytes,
    }


def hf_loss(model: LlamaForCausalLM) -> LossFn:
    """The loss function of a transformers model."""

    @torch.no_grad()
    def loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")

    return loss


def evaluate(model: LlamaForCausalLM, corpus: Arrays, orders: int) -> dict[str, object]:
    """All reported figures of a model; ``orders`` shuffles for the mixed packings."""
    loss, device = hf_loss(model), model.device
    figures: dict[str, object] = {}
    for name in ("coffee", "services", "math", "python", "pytask", "tools"):
        for block in (1024, 8192):
            figures[f"{name}_{block}"] = source_figures(loss, corpus, name, block, device)
    short, long = (mixed_losses(loss, corpus, block, device, orders) for block in (1024, 8192))
    figures["mixed_1024"], figures["mixed_8192"] = short, long
    figures["ratio_8192_to_1024"] = {
        **{f"{name}_mixed": round(float(str(long[name])) / float(str(short[name])), 4) for name in DIALOGUES},
        **{f"{name}_alone": ratio(figures, name) for name in DIALOGUES},
    }
    return figures


def ratio(figures: dict[str, object], name: str) -> float:
    """Nats a token at 8192 over those at 1024, the source packed alone."""
    long, short = figures[f"{name}_8192"], figures[f"{name}_1024"]
    assert isinstance(long, dict)
    assert isinstance(short, dict)
    return round(float(long["nats_per_token"]) / float(short["nats_per_token"]), 4)


def load_model(folder: Path, device: torch.device) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Loads an exported folder with transformers; weights are upcast to float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    model.to(device)  # type: ignore[arg-type]
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.npz")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures and samples there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = logging.getLogger("nano.evaluate")
    model, tokenizer = load_model(args.model, torch.device(args.device))
    figures = evaluate(model, load_corpus(args.corpus), args.orders)
    samples = run_samples(model, tokenizer)
    for name, value in figures.items():
        log.info("%-18s %s", name, value)
    for sample in samples:
        log.info("---- %s\n%s", sample.name, sample.transcript())
    if args.json:
        content = {"figures": figures, "samples": [{"name": s.name, "turns": s.turns} for s in samples]}
        args.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
