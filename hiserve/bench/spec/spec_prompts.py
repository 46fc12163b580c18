"""Prompts of real text: what comes along, recorded dialogues, or agent sessions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from hiserve.bench.datasets.agents import read_rows
from hiserve.bench.datasets.chats import Dialogue
from hiserve.bench.datasets.files import read_lines
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec.engine import Tokens
from hiserve.bench.workload import Messages
from hiserve.config.options import Options
from hiserve.errors import ConfigError
from hiserve.models.builtin_shapes import read_model
from hiserve.text.chat_request import parse_chat
from hiserve.text.frontend import load_frontend

HELD_OUT = Path(__file__).parents[1] / "datasets" / "held_out.jsonl"


def read_prompts(config: Options, sweep: SweepOptions) -> list[Tokens]:
    """Returns as many prompts as the largest batch has; of longer ones the last ``prompt_length`` tokens.

    Raises:
        ConfigError: The data has fewer, or cannot be read.
        ModelError: The model's tokenizer or template cannot be used.
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
    """Returns conversations that end with the user, or texts.

    Raises:
        ConfigError: There are fewer than the largest batch has, or the data cannot be read.
    """
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
