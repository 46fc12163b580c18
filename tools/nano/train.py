"""Trains the model: ``python -m tools.nano.train --corpus NPZ --tokenizer DIR --out DIR``.

One run makes the whole of it: mixed batches of 1k and 8k blocks, an exponential moving average (EMA) of the weights,
the checkpoint with the best validation loss of that average, export, evaluation through transformers, samples.
"""

import argparse
import copy
import json
import logging
import math
import platform
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from tools.nano.evaluate import LossFn, evaluate, load_model, mean_losses
from tools.nano.export import export, load_state
from tools.nano.model import Nano, NanoConfig, next_token_losses
from tools.nano.optimizer import adamw, learning_rate
from tools.nano.samples import run_samples
from tools.nano.stream import DIALOGUES, Arrays, StreamConfig, TokenStream, load_corpus


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of a run."""

    steps: int = 6000  # optimizer steps planned
    seconds: float = 500.0  # time limit of the training loop; the learning rate reaches its end by then too
    lr: float = 2e-3  # peak learning rate
    lr_end: float = 0.02  # last learning rate over the peak
    warmup: int = 300  # steps of linear warm-up
    weight_decay: float = 1.5  # AdamW's, on matrices only
    dropout: float = 0.1  # on the embedding and on what each attention and MLP adds
    clip: float = 1.0  # gradient norm limit
    ema: float = 0.998  # share of the average kept at each step
    eval_every: int = 250  # steps between validations
    seed: int = 0  # of weights, shuffling and dropout


@dataclass(slots=True)
class Progress:
    """What a run remembers: the curve and the best averaged weights so far."""

    curve: list[dict[str, float]] = field(default_factory=list)
    best_score: float = math.inf
    best_step: int = 0
    best_state: dict[str, Tensor] = field(default_factory=dict)


def nano_loss(model: Nano) -> LossFn:
    """Validation losses of a model without dropout, in bf16 on a GPU."""

    @torch.no_grad()
    def loss(ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.device.type == "cuda"):
            return next_token_losses(model.embed_tokens.weight, model(ids[:, :-1]), ids[:, 1:])[0]

    return loss


def validate(model: Nano, corpus: Arrays, device: torch.device, span: int) -> dict[str, float]:
    """Losses of the early-stopping halves of the chats at 1k and at ``span``, and their mean as ``score``."""
    loss = nano_loss(model)
    losses = {
        f"{name}_{block}": value
        for block in (1024, span)
        for name, value in mean_losses(loss, corpus, "early", block, device, (*DIALOGUES, "tools")).items()
    }
    return losses | {"score": sum(losses.values()) / len(losses)}


class Trainer:
    """Holds what the training loop needs."""

    def __init__(self, model: Nano, config: TrainConfig, stream: TokenStream, corpus: Arrays, compiled: bool) -> None:
        """Compiles the layers one by one, so that the eight share their code, and the loss."""
        self.model, self.config, self.stream, self.corpus = model, config, stream, corpus
        self.average = copy.deepcopy(model).eval()
        self.optimizer = adamw(model, config.lr, config.weight_decay)
        self.losses = torch.compile(next_token_losses, dynamic=False) if compiled else next_token_losses
        if compiled:
            for layer in model.layers:
                layer.compile(dynamic=False)
        self.log = logging.getLogger("nano.train")

    def step(self, x: Tensor, y: Tensor, lr: float) -> Tensor:
        """One optimizer step and one step of the average; returns the loss without waiting for it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = self.losses(self.model.embed_tokens.weight, self.model(x), y).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - self.config.ema)
        return loss.detach()

    def train(self) -> Progress:
        """Runs the loop; stops after ``steps`` steps or ``seconds`` seconds."""
        config, progress = self.config, Progress()
        began, warm, losses = time.monotonic(), 0.0, []
        for step, (x, y) in enumerate(self.stream.batches()):
            elapsed = time.monotonic() - began
            if step <= config.warmup:  # compilation lies before this; the schedule by time starts after it
                warm = elapsed
            by_time = (elapsed - warm) / max(config.seconds - warm, 1.0)
            done = max(step / config.steps, by_time)
            if step == config.warmup // 2:
                self.average.load_state_dict(self.model.state_dict())
            losses.append(self.step(x, y, config.lr * learning_rate(step, config.warmup, done, config.lr_end)))
            if (step + 1) % config.eval_every == 0 or done >= 1 or step + 1 == config.steps:
                self.record(progress, step + 1, elapsed, losses)
                losses = []
            if done >= 1 or step + 1 >= config.steps:
                break
        return progress

    def record(self, progress: Progress, step: int, elapsed: float, losses: list[Tensor]) -> None:
        """Validates the average, keeps it if it is the best, and adds a point to the curve."""
        found = validate(self.average, self.corpus, self.stream.device, self.stream.config.span)
        row = {
            "step": step,
            "tokens": step * self.stream.config.batch_tokens,
            "epochs": self.stream.epochs,
            "seconds": round(elapsed, 1),
            "lr": round(self.optimizer.param_groups[0]["lr"], 6),
            "train_loss": round(float(torch.stack(losses).mean()), 4),
            **{name: round(value, 4) for name, value in found.items()},
        }
        progress.curve.append(row)
        self.log.info("%s", json.dumps(row))
        if found["score"] < progress.best_score:
            progress.best_score, progress.best_step = found["score"], step
            progress.best_state = {name: t.detach().clone() for name, t in self.average.state_dict().items()}


def parse_arguments() -> argparse.Namespace:
    """Command line; every field of ``TrainConfig`` is an option."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.npz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer's files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and training.json")
    parser.add_argument("--init", type=Path, help="folder of an exported model to start from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rope-theta", type=float, default=NanoConfig().rope_theta)
    parser.add_argument("--long-every", type=int, default=StreamConfig().long_every)
    parser.add_argument("--layers", type=int, default=NanoConfig().num_layers)
    parser.add_argument("--span", type=int, default=StreamConfig().span)
    parser.add_argument("--batch-tokens", type=int, default=StreamConfig().batch_tokens)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    for name, value in asdict(TrainConfig()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def run_record(args: argparse.Namespace, trainer: Trainer, progress: Progress) -> dict[str, object]:
    """Everything about a run that is worth keeping, as JSON."""
    cuda = args.device == "cuda"
    steps = int(progress.curve[-1]["step"])
    return {
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "model": asdict(trainer.model.config),
        "train": asdict(trainer.config),
        "stream": asdict(trainer.stream.config),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": steps,
        "tokens_trained": steps * trainer.stream.config.batch_tokens,
        "epochs": trainer.stream.epochs,
        "best_step": progress.best_step,
        "best_score": round(progress.best_score, 4),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "curve": progress.curve,
    }


def main() -> None:
    """Trains, exports, evaluates."""
    began = time.monotonic()
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = logging.getLogger("nano.train")
    config = TrainConfig(**{name: getattr(args, name) for name in asdict(TrainConfig())})
    log.info("seed %d; %s", config.seed, config)
    torch.manual_seed(config.seed)
    device = torch.device(args.device)
    shape = NanoConfig(num_layers=args.layers, rope_theta=args.rope_theta)
    corpus = load_corpus(args.corpus)
    cut = StreamConfig(
        span=args.span, short=min(1024, args.span), long_every=args.long_every, batch_tokens=args.batch_tokens
    )
    stream = TokenStream(corpus, cut, device, config.seed)
    model = Nano(shape, config.dropout).to(device)
    if args.init:
        model.load_state_dict(load_state(args.init))
    trainer = Trainer(model, config, stream, corpus, args.compile)
    progress = trainer.train()
    record = run_record(args, trainer, progress)
    record["train_seconds"] = round(time.monotonic() - began, 1)
    export(progress.best_state, shape, args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.tokenizer / name, args.out / name)
    exported, tokenizer = load_model(args.out, device)
    record["figures"] = evaluate(exported, corpus, orders=4)
    samples = run_samples(exported, tokenizer)
    record["samples"] = [{"name": sample.name, "turns": sample.turns} for sample in samples]
    record["wall_seconds"] = round(time.monotonic() - began, 1)
    (args.out / "training.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    log.info("%s", json.dumps(record["figures"], indent=1))
    for sample in samples:
        log.info("---- %s\n%s", sample.name, sample.transcript())


if __name__ == "__main__":
    main()
