"""Speculation in Prometheus' words: what was proposed, what of it accepted. Without speculation there are no series."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from hiserve.core.draft_use import DraftStats, DraftUse

NO_DRAFTS = DraftUse()
ALL = "all"  # value of the ``cache_source`` label


class DraftMetrics:
    """Counts what became of the drafts of all workers.

    Args:
        registry: Where the metrics go.
        model_name: Value of the ``model_name`` label.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name
        self._verified = self._counter(
            "spec_decode_num_drafts",
            "Steps of a row that verified drafts, by where its prompt came from.",
            "cache_source",
        )
        self._proposed = self._counter("spec_decode_num_draft_tokens", "Drafts that they verified.", "cache_source")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Of them, those accepted.", "cache_source")
        self._by_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted at each position, from 0.", "position"
        )
        self._chosen = self._counter(
            "spec_decode_chosen_steps", "Steps, by how many drafts were to follow each token drawn.", "num_steps"
        )
        self._length = Gauge(
            "hiserve:spec_accept_length",
            "Tokens that a verifying step gave on average, since the workers started; all is of all sources.",
            ("model_name", "cache_source"),
            registry=registry,
        )

    def show(self, workers: Sequence[DraftStats]) -> None:
        """Takes over the averages of all workers."""
        sources = dict.fromkeys(source for stats in workers for source in stats.by_source)
        uses = {
            source: sum((stats.by_source.get(source, NO_DRAFTS) for stats in workers), NO_DRAFTS) for source in sources
        }
        if uses:
            uses[ALL] = sum(uses.values(), NO_DRAFTS)
        for source, use in uses.items():
            self._length.labels(self._model_name, source).set(use.accept_length)

    def count(self, before: DraftStats, now: DraftStats) -> None:
        """Adds what one worker did between two looks."""
        name = self._model_name
        for source, use in now.by_source.items():
            old = before.by_source.get(source, NO_DRAFTS)
            self._verified.labels(name, source).inc(use.verify_steps - old.verify_steps)
            self._proposed.labels(name, source).inc(use.proposed - old.proposed)
            self._accepted.labels(name, source).inc(use.accepted - old.accepted)
        accepted, old_accepted = _by_position(now), _by_position(before)
        for position, count in enumerate(accepted):
            old_count = old_accepted[position] if old_accepted else 0
            self._by_position.labels(name, str(position)).inc(count - old_count)
        for num_steps, count in now.chosen_steps.items():
            self._chosen.labels(name, num_steps).inc(count - before.chosen_steps.get(num_steps, 0))

    def _counter(self, name: str, help_text: str, label: str) -> Counter:
        return Counter(f"hiserve:{name}", help_text, ("model_name", label), registry=self._registry)


def _by_position(stats: DraftStats) -> tuple[int, ...]:
    return sum(stats.by_source.values(), NO_DRAFTS).accepted_per_position
