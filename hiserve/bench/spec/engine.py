"""As much of the offline API as speculation is measured with, and one batch through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from hiserve.config.options import Options
from hiserve.core.request import SamplingParams
from hiserve.core.startup_measurements import StepCosts
from hiserve.core.usage import COLD, DraftUse
from hiserve.errors import ConfigError
from hiserve.ipc.cache_stats import TierName

Tokens = list[int]


class SpecEngine(Protocol):
    """The offline API, in process.

    Attributes:
        config: Resolved.
    """

    @property
    def config(self) -> Options:
        """As the attribute says."""

    @property
    def draft_costs(self) -> StepCosts | None:
        """What drafts cost, as measured at start, where their number is chosen step by step."""

    def generate(self, prompts: Any, sampling: Any = None) -> Sequence[Any]:
        """Generates for every prompt."""

    def flush(self, tiers: tuple[TierName, ...] = ...) -> int:
        """Empties tiers of the prefix cache."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were given at once.

    Attributes:
        seconds: From the first request's first token to the last one's last.
        num_decoded: Tokens of all replies but the first of each, which comes with its prompt.
        num_steps: Steps of the request that took most.
        drafts: What became of all drafts.
        cached_tokens: Prompt tokens that came from the cache, by tier.
    """

    seconds: float
    num_decoded: int
    num_steps: int
    drafts: DraftUse
    cached_tokens: dict[str, int]

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second, all requests together."""
        return self.num_decoded / self.seconds

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.num_steps


def run_batch(
    engine: SpecEngine, prompts: list[Tokens], params: list[SamplingParams]
) -> tuple[BatchResult, list[Tokens]]:
    """Gives requests at once and waits for all; returns what was measured, and the replies."""
    outputs = engine.generate(prompts, params)
    choices = [output.outputs[0] for output in outputs]
    uses = [choice.drafts or DraftUse() for choice in choices]
    steps = [len(choice.token_ids) - 1 - use.accepted for choice, use in zip(choices, uses, strict=True)]
    batch = BatchResult(
        seconds=max(choice.end_s for choice in choices) - min(choice.first_token_s for choice in choices),
        num_decoded=sum(len(choice.token_ids) - 1 for choice in choices),
        num_steps=max(steps),
        drafts=sum(uses, DraftUse()),
        cached_tokens={
            tier: sum(getattr(output.cached, tier) for output in outputs) for tier in ("device", "host", "store")
        },
    )
    return batch, [choice.token_ids for choice in choices]


def prepare(engine: SpecEngine, prompts: list[Tokens], source: str) -> None:
    """Brings the prompts to where a batch is to find them: ``cold``, ``device`` or ``host``."""
    engine.flush()
    if source == COLD:
        return
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
    if source == "host":
        engine.flush(("device",))


def check_source(batches: Sequence[BatchResult], source: str) -> None:
    """Refuses batches that did not find their prompts where they should have been.

    Raises:
        ConfigError: None of them did.
    """
    tiers = {tier: sum(batch.cached_tokens[tier] for batch in batches) for tier in ("device", "host", "store")}
    found = sum(tiers.values()) if source == COLD else tiers[source]
    if bool(found) == (source == COLD):
        told = ", ".join(f"{count} from the {tier}" for tier, count in tiers.items())
        raise ConfigError(
            f"prompts were to be found {source}, and of their tokens came {told}. Give longer prompts, raise --kv-pages or "
            f"--host-cache-gib, or leave {source} out of --sources.",
            param="sources",
        )
