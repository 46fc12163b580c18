"""Trains a draft head of the frozen model: ``python -m tools.nano.train_heads --head eagle3|mtp --corpus NPZ --out DIR``.

Nothing is stored: the target's states and distributions come from a pass over each batch. A share of every batch is
text that the target wrote itself. Each step unrolls the head as drafting does ("training-time test", EAGLE-3) and
compares every draft with the target's distribution at its place.
"""

import argparse
import json
import logging
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.nano.accept import SOURCES, Reply, figures, held_out, long_replies
from tools.nano.generate import continuations
from tools.nano.head_files import export_head, load_head, load_target
from tools.nano.heads import HEADS, Head, observe, unroll
from tools.nano.model import Nano
from tools.nano.optimizer import adamw, learning_rate
from tools.nano.stream import DIALOGUES, Arrays, StreamConfig, TokenStream, load_corpus


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """Settings of a run."""

    steps: int = 20_000  # optimizer steps at most
    seconds: float = 150.0  # time limit of the run up to its last step; the learning rate reaches its end by then too
    lr: float = 2e-3  # peak learning rate
    lr_end: float = 0.02  # last learning rate over the peak
    warmup: int = 100  # steps of linear warm-up
    weight_decay: float = 0.01  # AdamW's, on matrices only
    clip: float = 0.5  # gradient norm limit
    unrolled: int = 5  # drafts of a training chain
    decay: float = 0.8  # weight of a draft in the loss over that of the draft before it
    first_share: float = 0.0  # share of the run, from its start, that trains the first draft alone
    window: int = 2048  # rows of a block at most that start chains; in longer blocks the window lies anywhere
    own_tokens: int = 6_291_456  # tokens that the target writes before training; half of them are prompts
    own_share: float = 0.5  # share of a batch's blocks taken from them
    own_block: int = 512  # tokens of a prompt and its continuation; divides the stream's ``span``
    evaluations: int = 8  # looks at the early-stopping halves
    early_limit: int = 64  # prompts of each of them
    seed: int = 0  # of weights, shuffling and the target's sampling


TRAINING = {
    "eagle3": HeadTraining(lr=4e-3, unrolled=4, first_share=0.2),
    "mtp": HeadTraining(unrolled=3, decay=0.6, first_share=0.2),
}
# Rows of the target's own writing made at a time, and the temperatures that they are given in turn.
OWN_ROWS = 1024
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)
EARLY_TOKENS = 100


def soft_losses(weight: Tensor, normed: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy of drafts against the target's distribution, in nats.

    Args:
        weight: ``[vocab, hidden]``. The head's output layer.
        normed: ``[B, W, hidden]``.
        wanted: ``[B, W, vocab]``. Probabilities.

    Returns:
        ``[B, W]`` float32.
    """
    logits = F.linear(normed, weight).float()
    return logits.logsumexp(-1) - (wanted * logits).sum(-1)


def chain_losses(head: Head, target: Nano, ids: Tensor, num_steps: int, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Losses of a batch's drafts by step, and how often each step's draft is the target's first choice.

    Args:
        head: Gets the gradients.
        target: Frozen.
        ids: int64 ``[B, T]``.
        num_steps: Drafts of a chain.
        start: First row that starts a chain.
        rows: Rows that do.

    Returns:
        Two float32 ``[num_steps]``.
    """
    seen, embedding = observe(target, ids), target.embed_tokens.weight
    with torch.no_grad():
        logits = target.logits(seen.last[:, start + 1 : start + rows + num_steps]).float()
        wanted, choice = logits.softmax(-1), logits.argmax(-1)
    losses, agreed = [], []
    for step, normed in enumerate(unroll(head, embedding, ids, seen, num_steps, start, rows)):
        weight = head.output_weight(embedding)
        losses.append(soft_losses(weight, normed, wanted[:, step : step + rows]).mean())
        with torch.no_grad():
            drafts = F.linear(normed[:, ::8], weight).argmax(-1)
            agreed.append((drafts == choice[:, step : step + rows : 8]).float().mean())
    return torch.stack(losses), torch.stack(agreed)


def own_spans(target: Nano, stream: TokenStream, config: HeadTraining) -> Tensor:
    """Text that the target wrote: continuations of training prompts, greedy and sampled, int64 ``[N, span]``."""
    span, block, device = stream.config.span, config.own_block, stream.device
    prompts = stream.epoch()[0].reshape(-1, block // 2)
    written, num_rows = [], max(1, config.own_tokens // span) * (span // block)
    for first in range(0, num_rows, OWN_ROWS):
        some = min(OWN_ROWS, num_rows - first)
        picked = torch.from_numpy(stream.random.integers(len(prompts), size=some)).to(device)
        lengths = torch.full((some,), block // 2, device=device)
        temperatures = torch.tensor(TEMPERATURES, device=device).repeat(-(-some // len(TEMPERATURES)))[:some]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            written.append(continuations(target, prompts[picked].long(), lengths, block // 2, temperatures))
    return torch.cat(written).view(-1, span)


def mixed_batches(stream: TokenStream, own: Tensor, share: float) -> Iterator[Tensor]:
    """The stream's batches, ``[B, T]`` int64, with a share of their blocks replaced by blocks of ``own``."""
    for ids, _ in stream.batches():
        blocks, num_own = own.view(-1, ids.shape[1]), round(share * len(ids))
        picked = torch.randint(len(blocks), (num_own,), device=own.device)
        yield torch.cat([blocks[picked], ids[num_own:]])


class HeadTrainer:
    """Holds what the training loop needs."""

    def __init__(self, head: Head, target: Nano, config: HeadTraining, stream: TokenStream, corpus: Arrays) -> None:
        """Prepares the target's answers to the early-stopping prompts, which measure progress."""
        self.head, self.target, self.config, self.stream = head, target, config, stream
        self.optimizer = adamw(head, config.lr, config.weight_decay)
        limit = config.early_limit
        self.early = held_out(target, corpus, "early", DIALOGUES, limit, EARLY_TOKENS, limit)
        self.curve: list[dict[str, object]] = []
        self.log = logging.getLogger("nano.heads")

    def step(self, ids: Tensor, lr: float, num_steps: int) -> Tensor:
        """One optimizer step; returns losses and agreement by draft, ``[2, num_steps]``, without waiting for them."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        limit = ids.shape[1] - num_steps
        rows = min(self.config.window, limit)
        start = int(self.stream.random.integers(limit - rows + 1))
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.device.type == "cuda"):
            losses, agreed = chain_losses(self.head, self.target, ids, num_steps, start, rows)
        weights = self.config.decay ** torch.arange(num_steps, device=ids.device)
        (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([losses.detach(), agreed])

    def train(self, own: Tensor, began: float) -> int:
        """Runs the loop until ``steps`` steps, or ``seconds`` seconds after ``began``; returns the steps made."""
        config, recent, marks = self.config, [], 0
        entered = time.monotonic()
        for step, ids in enumerate(mixed_batches(self.stream, own, config.own_share), start=1):
            by_time = (time.monotonic() - entered) / max(config.seconds - (entered - began), 1.0)
            done = min(1.0, max(step / config.steps, by_time))
            num_steps = 1 if done < config.first_share else config.unrolled
            rate = learning_rate(step - 1, config.warmup, done, config.lr_end)
            recent.append(self.step(ids, config.lr * rate, num_steps))
            if done * config.evaluations >= marks + 1 or done == 1:
                marks = int(done * config.evaluations)
                self.record(step, time.monotonic() - began, rate * config.lr, recent)
                recent = []
            if done == 1:
                break
        return step

    def record(self, step: int, seconds: float, lr: float, recent: list[Tensor]) -> None:
        """Adds a point to the curve: training losses since the last one, acceptance on the early-stopping halves."""
        found = figures(self.head, self.target, self.early, (1, 3), self.config.early_limit)["dialogues"]
        losses, agreed = torch.stack([r for r in recent if r.shape == recent[-1].shape]).mean(0).tolist()
        row = {
            "step": step,
            "seconds": round(seconds, 1),
            "lr": round(lr, 6),
            "losses": [round(value, 4) for value in losses],
            "agreement": [round(value, 4) for value in agreed],
            "k1": found["k1"],
            "k3": found["k3"],
        }
        self.curve.append(row)
        self.log.info("%s", json.dumps(row))


def new_head(kind: str, target: Nano, init: Path | None) -> Head:
    """Returns a head to train on the target's device, random or with the weights of the exported head in ``init``."""
    if init is None:
        return HEADS[kind](target).to(target.embed_tokens.weight.device)
    head = load_head(init, target).train()
    if not isinstance(head, HEADS[kind]):
        raise ValueError(f"{init} holds {type(head).__name__}; {kind} needs {HEADS[kind].__name__}")
    return head


def reported(target: Nano, corpus: Arrays, limit: int) -> dict[str, list[Reply]]:
    """The answers that the reported figures are measured on."""
    replies = held_out(target, corpus, "report", SOURCES, limit, 200, 64)
    return replies | long_replies(target, corpus, max(1, limit // 5), 100)


def parse_arguments() -> argparse.Namespace:
    """Command line; every field of ``HeadTraining`` is an option, whose default is the head's in ``TRAINING``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", choices=sorted(HEADS), required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.npz")
    parser.add_argument("--model", type=Path, default=Path("hiserve/models/nano"), help="folder of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head and training.json")
    parser.add_argument("--init", type=Path, help="folder of an exported head to start from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--span", type=int, default=StreamConfig().span)
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--long-every", type=int, default=StreamConfig().long_every)
    parser.add_argument("--report-limit", type=int, default=100, help="prompts a source for the reported figures")
    for name, value in asdict(HeadTraining()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value))
    return parser.parse_args()


def run_record(args: argparse.Namespace, trainer: HeadTrainer, num_steps: int) -> dict[str, object]:
    """Everything about a run that is worth keeping, as JSON."""
    cuda = args.device == "cuda"
    return {
        "head": args.head,
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "train": asdict(trainer.config),
        "stream": asdict(trainer.stream.config),
        "parameters": sum(p.numel() for p in trainer.head.parameters()),
        "steps": num_steps,
        "tokens_seen": num_steps * trainer.stream.config.batch_tokens,
        "epochs": trainer.stream.epochs,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "curve": trainer.curve,
    }


def main() -> None:
    """Trains, exports, and measures the exported head on the reported halves."""
    began = time.monotonic()
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = logging.getLogger("nano.heads")
    given = {name: getattr(args, name) for name in asdict(HeadTraining()) if getattr(args, name) is not None}
    config = replace(TRAINING[args.head], **given)
    log.info("seed %d; %s", config.seed, config)
    torch.manual_seed(config.seed)
    device, corpus = torch.device(args.device), load_corpus(args.corpus)
    cut = StreamConfig(
        span=args.span, short=min(1024, args.span), long_every=args.long_every, batch_tokens=args.batch_tokens
    )
    stream = TokenStream(corpus, cut, device, config.seed)
    target = load_target(args.model, device)
    head = new_head(args.head, target, args.init)
    trainer = HeadTrainer(head, target, config, stream, corpus)
    own = own_spans(target, stream, config)
    log.info("the target wrote %d tokens by second %.1f", own.numel() // 2, time.monotonic() - began)
    num_steps = trainer.train(own, began)
    record = run_record(args, trainer, num_steps)
    record["train_seconds"] = round(time.monotonic() - began, 1)
    export_head(head, target.config, args.out)
    found = figures(load_head(args.out, target), target, reported(target, corpus, args.report_limit))
    record["figures"] = found
    record["wall_seconds"] = round(time.monotonic() - began, 1)
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, value in found.items():
        log.info("%-20s %s", name, json.dumps(value))
    log.info("%d steps, %.1f s in all", num_steps, record["wall_seconds"])


if __name__ == "__main__":
    main()
