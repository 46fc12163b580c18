"""As much of the offline API as speculation is measured with: one batch through it, and prompts of real text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hiserve.bench.datasets.recorded import Dialogue, read_lines, read_rows
from hiserve.bench.options import SweepOptions
from hiserve.bench.workload import Messages
from hiserve.config.options import Options
from hiserve.core.request import SamplingParams
from hiserve.core.startup_measurements import StepCosts
from hiserve.core.usage import COLD, DraftUse
from hiserve.errors import ConfigError
from hiserve.ipc.cache_stats import TierName
from hiserve.models.builtin_shapes import read_model
from hiserve.text.body.chat import parse_chat
from hiserve.text.frontend import load_frontend

Tokens = list[int]
HELD_OUT = Path(__file__).parent / "datasets" / "held_out.jsonl"


class SpecEngine(Protocol):
    """The offline API, in process."""

    @property
    def settings(self) -> Options:
        """The settings, resolved."""

    @property
    def draft_costs(self) -> StepCosts | None:
        """The costs of drafts, measured at start where their number is chosen step by step."""

    def generate(self, prompts: Any, sampling: Any = None) -> Sequence[Any]:
        """Generates for every prompt."""

    def flush(self, tiers: tuple[TierName, ...] = ...) -> int:
        """Empties tiers of the prefix cache."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were given at once."""

    seconds: float  # from the first request's first token to the last one's last
    num_decoded: int  # tokens of all replies but the first of each, which comes with its prompt
    num_steps: int  # steps of the request that took most
    drafts: DraftUse  # what became of all drafts
    cached_tokens: dict[str, int]  # prompt tokens that came from the cache, by tier

    @property
    def tokens_per_s(self) -> float:
        return self.num_decoded / self.seconds

    @property
    def step_s(self) -> float:
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
    """Refuses batches that did not find their prompts where they should have been. Raises ConfigError."""
    tiers = {tier: sum(batch.cached_tokens[tier] for batch in batches) for tier in ("device", "host", "store")}
    found = sum(tiers.values()) if source == COLD else tiers[source]
    if bool(found) == (source == COLD):
        sources = ", ".join(f"{count} from the {tier}" for tier, count in tiers.items())
        raise ConfigError(
            f"prompts were to be found {source}, and of their tokens came {sources}. Give longer prompts, raise --kv-pages or "
            f"--host-cache-gib, or leave {source} out of --sources.",
            param="sources",
        )


def read_prompts(config: Options, sweep: SweepOptions) -> list[Tokens]:
    """Returns as many prompts as the largest batch has; of longer ones the last ``prompt_length`` tokens.

    Raises ConfigError or ModelError.
    """
    texts = read_texts(sweep)
    folder, model = read_model(config.model)
    frontend = load_frontend(config.model, folder, model)
    tokenizer, template = frontend.tokenizer, frontend.template
    prompts = []
    for text in texts:
        if isinstance(text, list):  # a model without a template goes on with what was said
            said = "\n".join(message["content"] for message in text)
            text = said if template is None else template.render(parse_chat({"messages": text}))
        prompts.append(tokenizer.encode(text, add_special_tokens=False)[-sweep.prompt_length :].tolist())
    return prompts


def read_texts(sweep: SweepOptions) -> list[Messages | str]:
    """Returns conversations that end with the user, or texts. Raises ConfigError."""
    count = max(sweep.batches)
    if sweep.dataset != "held-out" and sweep.path is None:
        raise ConfigError(f"--dataset {sweep.dataset} needs --path, the file of the recording.", param="path")
    if sweep.dataset == "agent-sessions":
        assert sweep.path is not None
        rows, _ = read_rows(sweep.path, None)
        # The longest prompt of each session, so that no two of them share more than how sessions begin.
        longest = {row.session_id: row.input for row in sorted(rows, key=lambda row: len(row.input))}
        prompts: list[Any] = list(longest.values())[:count]
    else:
        path = HELD_OUT if sweep.dataset == "held-out" else sweep.path
        assert path is not None
        found = (_asked(dialogue) for dialogue in read_lines(path, Dialogue, sweep.dataset))
        prompts = list(islice((messages for messages in found if messages), count))
    if len(prompts) < count:
        raise ConfigError(
            f"--batches has {count}, and {sweep.path or sweep.dataset} gives {len(prompts)} prompts. Give smaller "
            "batches, or more text (--dataset chats --path FILE).",
            param="batches",
        )
    return prompts


def _asked(dialogue: Dialogue) -> Messages:
    """Returns a dialogue up to its last message of the user; empty if there is none."""
    messages = dialogue.as_sent()
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages
