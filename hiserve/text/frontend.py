"""Tokenizer, chat template and encoders of one model, loaded the same way by the server, ``LLM`` and the benchmarks."""

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
    """Everything that converts a model's text to tokens and back.

    Attributes:
        tokenizer: The model's tokenizer.
        template: The chat template; None where the model has none.
        token_bytes: Bytes of every token, for detokenizers.
        default_sampling: Sampling values for fields that a request omits, by ``--sampling-defaults``.
        reply_cache: Token ids of generated replies, for prompts that contain them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    token_bytes: TokenBytes
    default_sampling: SamplingParams
    reply_cache: ReplyTokenCache = field(default_factory=ReplyTokenCache)

    def prompt_encoder(self) -> PromptEncoder:
        """Returns a server's encoder, with its own threads and processes; the caller closes it."""
        return PromptEncoder(self.tokenizer, self.template, self.reply_cache)

    def conversation_encoder(self) -> ConversationEncoder | None:
        """Returns an encoder that works in the caller's thread; None without a template."""
        return None if self.template is None else ConversationEncoder(self.tokenizer, self.template, self.reply_cache)


def load_frontend(settings: Model, folder: Path, model: ModelConfig) -> Frontend:
    """Loads the tokenizer and the chat template from a model's folder.

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
