"""Chat encoders: prompts that a function makes, for models whose checkpoints have no chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.template import deepseek_v4, deepseek_v32
from hiserve.text.template.budget import RenderBudget
from hiserve.text.template.chat_template import TEMPLATE_FAILURES, ChatTemplate, Sources

# Returns the prompt for the variables that a chat template has; raises ``ValueError`` for turns that have no place in it.
ChatEncoder = Callable[[Mapping[str, Any]], str]


class _Row(NamedTuple):
    """A chat encoder, and texts that a template in its place would contain."""

    encode: ChatEncoder
    signs: tuple[str, ...]


# By the architecture of their models.
ENCODERS = {
    "DeepseekV4ForCausalLM": _Row(
        deepseek_v4.encode, deepseek_v4.SIGNS + deepseek_v4.MARKS + (*deepseek_v4.TASKS.values(),)
    ),
    "DeepseekV32ForCausalLM": _Row(deepseek_v32.encode, deepseek_v32.SIGNS + deepseek_v4.MARKS),
}


class EncodedTemplate(ChatTemplate):
    """A chat encoder in the place of a template.

    Args:
        architecture: A key of ``ENCODERS``.
    """

    def __init__(self, architecture: str) -> None:
        super().__init__("")
        row = ENCODERS[architecture]
        self._encode = row.encode
        self.sources = Sources("\n".join(row.signs), {}, None, architecture)

    def _run(
        self, template: jinja2.Template, variables: dict[str, Any], max_chars: int | None, budget: RenderBudget
    ) -> str:
        """Takes no budget: its work grows with the length of the prompt."""
        try:
            text = self._encode(variables)
        except TEMPLATE_FAILURES as error:
            raise RequestError(f"the model takes no such messages: {str(error)[:200]}", param="messages") from None
        if max_chars is not None and len(text) > max_chars:
            raise ContextLengthError(
                f"these messages make a prompt of more than {max_chars} characters, which cannot fit the context. Shorten them.",
                param="messages",
            )
        return text


def template_of(sources: Sources) -> ChatTemplate:
    """Returns the template with the sources of another."""
    return EncodedTemplate(sources.encoder) if sources.encoder else ChatTemplate.of(sources)


def load_template(folder: Path, architecture: str, override: Path | None = None) -> ChatTemplate | None:
    """Returns a model's chat template, or its encoder where the folder has none; None without either.

    Args:
        folder: Of the model.
        architecture: Of the model.
        override: As for ``ChatTemplate.load``.

    Raises:
        ConfigError, ModelError: As ``ChatTemplate.load``.
    """
    found = ChatTemplate.load(folder, override)
    return EncodedTemplate(architecture) if found is None and architecture in ENCODERS else found
