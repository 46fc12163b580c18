"""The training stream: shuffles documents, puts heads before them and cuts the result into blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]
DIALOGUES = ("coffee", "services")


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How an epoch is put together."""

    span: int = 8192  # tokens that stay together when blocks are shuffled; the longest block
    short: int = 1024  # tokens of a short block; divides ``span``
    long_every: int = 4  # every so many batches, one is cut into ``span``-long blocks instead of short ones
    batch_tokens: int = 65_536  # tokens a batch; a multiple of ``span``
    system_share: float = 0.2  # share of chats that get a system message
    # Share of documents that follow the previous one without ``<|bos|>``, as a chat that goes on.
    join_share: float = 0.15


def load_corpus(path: Path) -> Arrays:
    """Reads ``corpus.npz``."""
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def documents(corpus: Arrays, part: str, names: tuple[str, ...]) -> list[tuple[int, np.ndarray]]:
    """Source number and tokens of every ``early`` or ``report`` document of the named sources."""
    numbers = {int(np.flatnonzero(corpus["source_names"] == name)[0]) for name in names}
    pieces = np.split(corpus[f"{part}_tokens"], np.cumsum(corpus[f"{part}_lengths"])[:-1])
    pairs = zip(corpus[f"{part}_sources"], pieces, strict=True)
    return [(int(source), piece.astype(np.int64)) for source, piece in pairs if int(source) in numbers]


class TokenStream:
    """Endless batches over a packed corpus that lies on the training device."""

    def __init__(self, corpus: Arrays, config: StreamConfig, device: torch.device, seed: int) -> None:
        """Moves the tokens to ``device`` and lists each source's documents and heads."""
        self.config, self.device = config, device
        self.random = np.random.default_rng(seed)
        tokens = np.concatenate([corpus["body_tokens"], corpus["head_tokens"]]).astype(np.int32)
        self.tokens = torch.from_numpy(tokens).to(device)
        lengths = np.concatenate([corpus["body_lengths"], corpus["head_lengths"]]).astype(np.int64)
        self.lengths, self.starts = lengths, np.cumsum(lengths) - lengths
        num_bodies = len(corpus["body_lengths"])
        self.bare_head = num_bodies
        self.sources = corpus["body_sources"]
        self.order = np.repeat(np.arange(num_bodies), corpus["weights"][self.sources])
        self.heads = [
            num_bodies + np.flatnonzero(corpus["head_sources"] == number) for number in range(len(corpus["weights"]))
        ]
        self.epochs = 0

    def _heads_for(self, order: np.ndarray) -> np.ndarray:
        """Chooses a head for every document; -1 is none."""
        config, draw = self.config, self.random.random(len(order))
        chosen = np.full(len(order), self.bare_head)
        for number, heads in enumerate(self.heads):
            mine = np.flatnonzero((self.sources[order] == number) & (draw < config.system_share))
            if len(heads):
                chosen[mine] = self.random.choice(heads, len(mine))
        chosen[draw >= 1.0 - config.join_share] = -1
        return chosen

    def epoch(self) -> tuple[Tensor, Tensor]:
        """One pass over the weighted corpus: inputs and targets ``[N, span]`` int32 on the device, spans shuffled."""
        order = self.random.permutation(self.order)
        heads = self._heads_for(order)
        starts = np.stack([self.starts[heads], self.starts[order]], axis=1).ravel()
        lengths = np.stack([np.where(heads < 0, 0, self.lengths[heads]), self.lengths[order]], axis=1).ravel()
        shift = torch.from_numpy(starts - (np.cumsum(lengths) - lengths)).to(self.device)
        index = torch.repeat_interleave(shift, torch.from_numpy(lengths).to(self.device))
        stream = self.tokens[index + torch.arange(len(index), device=self.device)]
        span = self.config.span
        count = (len(stream) - 1) // span
        shuffle = torch.from_numpy(self.random.permutation(count)).to(self.device)
        self.epochs += 1
        return stream[: count * span].view(count, span)[shuffle], stream[1 : count * span + 1].view(count, span)[
            shuffle
        ]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs and targets ``[B, T]`` int64; ``T`` is ``short`` or, every ``long_every`` batches, ``span``."""
        config = self.config
        rows, step = config.batch_tokens // config.span, 0
        while True:
            inputs, targets = self.epoch()
            for first in range(0, len(inputs) - rows + 1, rows):
                step += 1
                length = config.span if step % config.long_every == 0 else config.short
                x, y = inputs[first : first + rows], targets[first : first + rows]
                yield x.reshape(-1, length).long(), y.reshape(-1, length).long()
