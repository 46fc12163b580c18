"""What turns text into tokens and back for one model; the server, ``LLM`` and the benchmarks load it the same way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hiserve.config.options import Model
from hiserve.core.request import SamplingParams
from hiserve.models.model_config import ModelConfig
from hiserve.text.conversation_encoder import ConversationEncoder
from hiserve.text.detokenizer import TokenBytes
from hiserve.text.prompt_encoder import PromptEncoder
from hiserve.text.reply_tokens import ReplyTokenCache
from hiserve.text.template import ChatTemplate
from hiserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Frontend:
    """A model's text half.

    Attributes:
        tokenizer: The model's.
        template: The chat template; None where the model has none.
        token_bytes: Bytes of every token, for detokenizers.
        default_sampling: Sampling of requests that do not say, as ``--sampling-defaults`` wants it.
        reply_cache: Tokens of generated replies, for the prompts that contain them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    token_bytes: TokenBytes
    default_sampling: SamplingParams
    reply_cache: ReplyTokenCache = field(default_factory=ReplyTokenCache)

    def prompt_encoder(self) -> PromptEncoder:
        """Returns the encoder of a server, with threads and processes of its own; the caller closes it."""
        return PromptEncoder(self.tokenizer, self.template, self.reply_cache)

    def conversation_encoder(self) -> ConversationEncoder | None:
        """Returns the encoder of conversations that works in the caller's thread; None without a template."""
        return None if self.template is None else ConversationEncoder(self.tokenizer, self.template, self.reply_cache)


def load_frontend(settings: Model, folder: Path, model: ModelConfig) -> Frontend:
    """Loads the text half of a model.

    Args:
        settings: Of the model.
        folder: The model's folder.
        model: Its configuration.

    Raises:
        ConfigError: ``--chat-template`` cannot be read.
        ModelError: The tokenizer or the chat template cannot be used.
    """
    tokenizer = Tokenizer.load(folder, model.eos_token_ids)
    override = None if settings.chat_template is None else Path(settings.chat_template)
    template = ChatTemplate.load(folder, override)
    uses_openais = settings.sampling_defaults == "openai"
    defaults = SamplingParams() if uses_openais else model.sampling_defaults.params()
    return Frontend(tokenizer, template, TokenBytes(tokenizer), defaults)
