"""The part of a model that one rank of a group holds, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY_STEP = 64  # tokens: each rank has whole blocks of noise, and whole words of masks


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``size`` equal shares; of rank ``rank``, counted from 0."""

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> tuple[int, int]:
        """Returns begin and end of this rank's share of ``count`` things, which ``size`` divides."""
        assert count % self.size == 0, f"{count} things for {self.size} ranks"
        share = count // self.size
        return self.rank * share, (self.rank + 1) * share

    def kv_heads(self, count: int) -> tuple[int, int]:
        """Returns begin and end of this rank's key and value heads; with fewer heads than ranks, several hold the same one."""
        if count >= self.size:
            return self.part(count)
        assert self.size % count == 0, f"{count} heads for {self.size} ranks"
        head = self.rank * count // self.size
        return head, head + 1

    def tokens(self, vocab_size: int) -> tuple[int, int]:
        """Returns begin and end of this rank's tokens: whole blocks, so that the last rank may have fewer."""
        share = self.token_share(vocab_size)
        return min(vocab_size, self.rank * share), min(vocab_size, (self.rank + 1) * share)

    def token_share(self, vocab_size: int) -> int:
        """Returns the most tokens of a rank."""
        return -(-vocab_size // (self.size * VOCABULARY_STEP)) * VOCABULARY_STEP


WHOLE = Shard()  # of a model that runs alone
