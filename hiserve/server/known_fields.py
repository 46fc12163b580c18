"""The one table of request fields: which are honoured, which change nothing, which are refused."""

from __future__ import annotations

from typing import Any

from hiserve.errors import RequestError

SAMPLING = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "no_stop_trim",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spec",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
_OPENAI = SAMPLING | {
    "best_of",
    "cache_salt",
    "logprobs",
    "max_completion_tokens",
    "model",
    "priority",
    "prompt_logprobs",
    "return_token_ids",
    "rid",
    "stream",
    "stream_options",
    "truncate_prompt_tokens",
}
# What a conversation's prompt is made from.
CONVERSATION = frozenset(
    {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "messages",
        "tools",
    }
)
CHAT = _OPENAI | CONVERSATION | {"top_logprobs"}
COMPLETIONS = _OPENAI | {"add_special_tokens", "echo", "prompt"}

# Fields that clients send and that cannot change what hiserve answers.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "return_cached_tokens_details",
        "return_spec_tokens_details",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "stream_reasoning",
        "user",
        "verbosity",
    }
)

# Fields that would change the answer where they are not honoured, with the values that change nothing.
# Null never does. Any other value is refused: no such field is silently ignored.
REFUSED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "audio_data": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image_data": (),
    "input_embeds": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": (),
    "stop_regex": ([],),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "token_ids_logprob": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "video_data": (),
    "web_search_options": (),
}


def check_fields(body: dict[str, Any], honoured: frozenset[str], *, is_strict: bool) -> None:
    """Refuses what would change the answer and is not served here.

    Args:
        body: The parsed body.
        honoured: Fields that this endpoint reads.
        is_strict: Refuse fields that are in no table, which are ignored otherwise.

    Raises:
        RequestError: A field is not supported or, if strict, not known.
    """
    for name, value in body.items():
        if name in honoured or name in IGNORED:
            continue
        if name in REFUSED:
            if not any(_is_same(value, neutral) for neutral in (None, *REFUSED[name])):
                raise RequestError(f"{name} is not supported yet.", param=name)
        elif is_strict:
            raise RequestError(f"{name[:100]} is not a field of this endpoint (--strict-fields).", param=name[:100])


def _is_same(value: Any, neutral: Any) -> bool:
    """Compares as JSON does: true is not 1, but 1.0 is."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
