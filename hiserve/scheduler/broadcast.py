"""Questions that go to every ready worker; the client is answered when the last of them has answered or died."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hiserve.ipc.cache_stats import TreeFacts
from hiserve.ipc.codec import Frames, encode
from hiserve.ipc.messages import CacheFlushed, CacheInspected, FlushCache, Flushed, InspectCache, Inspected

Question = FlushCache | InspectCache
Answer = CacheFlushed | CacheInspected


@dataclass(slots=True)
class _OpenQuestion:
    """A question, the workers that have not answered it, and the answers of the others."""

    question: Question
    waiting: set[int]
    answers: dict[int, Answer] = field(default_factory=dict)

    def conclusion(self) -> Flushed | Inspected:
        """Returns what the client is told."""
        ticket, answers = self.question.ticket, sorted(self.answers.items())
        if isinstance(self.question, FlushCache):
            return Flushed(ticket, sum(answer.pages for _, answer in answers if isinstance(answer, CacheFlushed)))
        trees = [
            TreeFacts(replica, answer.incarnation, answer.nodes)
            for replica, answer in answers
            if isinstance(answer, CacheInspected)
        ]
        return Inspected(ticket, trees)


class Broadcast:
    """All questions under way.

    Args:
        send: Sends frames to a worker.
        tell: Sends frames to the client.
    """

    def __init__(self, send: Callable[[int, Frames], None], tell: Callable[[Frames], None]) -> None:
        self._send = send
        self._tell = tell
        self._open: dict[int, _OpenQuestion] = {}

    def ask(self, question: Question, replicas: Iterable[int]) -> None:
        """Asks these workers; with none of them, the client is answered at once."""
        self._open[question.ticket] = _OpenQuestion(question, set(replicas))
        for replica in self._open[question.ticket].waiting:
            self._send(replica, encode(question))
        self._conclude()

    def answered(self, replica: int, answer: Answer) -> None:
        """Takes in the answer of a worker; one that nobody waits for is ignored."""
        if answer.ticket in self._open:
            self._open[answer.ticket].answers[replica] = answer
            self._open[answer.ticket].waiting.discard(replica)
            self._conclude()

    def lost(self, replica: int) -> None:
        """Waits no more for a worker that is gone."""
        for each in self._open.values():
            each.waiting.discard(replica)
        self._conclude()

    def _conclude(self) -> None:
        for ticket in [ticket for ticket, each in self._open.items() if not each.waiting]:
            self._tell(encode(self._open.pop(ticket).conclusion()))
