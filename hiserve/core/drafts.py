"""What a proposer of drafts takes after a step, and what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hiserve.core.plan import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class DraftStep:
    """A step of B rows and T tokens whose outcome the rows hold already; S of the rows sampled.

    Row b stored ``first[b]`` tokens before it, and computed ``q_lens[b]`` more, its former drafts included.

    Attributes:
        rows: int64 ``[B]``, on the device.
        first: int64 ``[B]``. Tokens stored before the step; of an illegal row anything.
        legal: bool ``[B]``. Rows that passed the check; what is made for the others goes to the sink.
        sampling: int64 ``[S]``. Which of the B rows sampled: the last token that they know is new.
        q_lens: int32 ``[B]``, on the host. Tokens that each row computed.
        kv_bounds: int32 ``[B]``, on the host. Upper bounds of the tokens that each row stores, these included.
        num_draft: Drafts to propose for each sampling row; 0 keeps what the proposer remembers up to date.
        is_greedy: No row draws at random.
        hidden_states: ``[T, n]``, what the model showed of each token; None if the proposer asked for nothing.
    """

    rows: Tensor
    first: Tensor
    legal: Tensor
    sampling: Tensor
    q_lens: Int32Array
    kv_bounds: Int32Array
    num_draft: int
    is_greedy: bool
    hidden_states: Tensor | None = None


class DraftWork(Protocol):
    """Drafting for a number of rows, in pieces that graphs can hold: over tensors that stay where they are.

    Attributes:
        results: What the pieces compute, for comparison.
    """

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Tensors that the work of ``prepare`` and ``extend`` write."""

    def prepare(self, step: DraftStep) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Returns the work that takes in steps of one shape, which is done once.

        Behind the first way to do it the first draft can be drawn. The second does less, and behind it nothing is drawn.

        Args:
            step: Of so many rows that all computed the same number of tokens, and sample; its tensors stay where they are,
                and hold another step each time.

        Returns:
            None if graphs cannot hold it.
        """

    def draw(self, *, is_greedy: bool) -> None:
        """Draws the next draft of each row, and writes it behind what the row knows."""

    def extend(self) -> None:
        """Computes what was drawn; then the next draft can be drawn."""


class Proposer(Protocol):
    """Guesses the next tokens of rows, cheaper than the model computes them.

    Attributes:
        aux_layers: Layers of the model, counted from 0, whose output it takes of every token, side by side; the number of
            layers stands for what the output head takes.
    """

    aux_layers: tuple[int, ...]

    def draft_work(self, num_rows: int) -> DraftWork | None:
        """Returns the work behind steps of so many rows, for graphs; None if it is not made of such pieces."""

    def propose(self, step: DraftStep) -> None:
        """Writes ``num_draft`` tokens behind what each sampling row knows, and waits for nothing.

        What it writes changes no output, only how many of its tokens are accepted.
        """
