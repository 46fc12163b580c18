"""Request fields without a type: ignored ones, refused ones, and unknown ones."""

from __future__ import annotations

from typing import Any

import msgspec

from hiserve.errors import NotFoundError, RequestError
from hiserve.text.body.json import check_text

# Fields that clients send and that cannot change the reply.
IGNORED = frozenset(
    {
        "cache_control",
        "metadata",
        "prediction",
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

# Fields without support that would change the reply, with the values, other than null, that change nothing. Any other
# value is refused: no such field is silently ignored.
REFUSED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "audio_data": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "compaction": (),
    "container": (),
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
    "mcp_servers": ([],),
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


def known_to(*kinds: type[msgspec.Struct]) -> frozenset[str]:
    """Returns the fields of all these types."""
    return frozenset(name for kind in kinds for name in kind.__struct_fields__)


def check_fields(body: dict[str, Any], honoured: frozenset[str], *, is_strict: bool) -> None:
    """Refuses fields that would change the reply and are not supported.

    Args:
        body: The parsed body.
        honoured: Fields that this endpoint reads.
        is_strict: Refuse unknown fields; otherwise they are ignored.

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


def check_model(body: dict[str, Any], served: str) -> None:
    """Checks that the body names the served model, or none.

    Raises:
        NotFoundError: It names another one.
        RequestError: The name is not a string.
    """
    name = body.get("model")
    if not isinstance(name, str | None):
        raise RequestError("model must be a string.", param="model")
    check_text(name or "", "model")
    if name is not None and name != served:
        raise NotFoundError(f"there is no model {name[:100]!r} here; this server serves {served!r}.", param="model")


def _is_same(value: Any, neutral: Any) -> bool:
    """Compares as JSON does: true is not 1, but 1.0 is."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
