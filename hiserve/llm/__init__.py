"""The offline API: a model, prompts in, texts out."""

from hiserve.llm.api import LLM
from hiserve.llm.outputs import CompletionOutput, RequestOutput, TokenLogprob

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "TokenLogprob"]
