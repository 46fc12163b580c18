"""Talks to a running server with the OpenAI client: a streamed chat of three turns, with what the cache served.

Start ``hiserve serve`` and run ``python examples/openai_chat.py [URL]``; needs ``pip install openai``.
"""

from __future__ import annotations

import sys

from openai import OpenAI

QUESTIONS = (
    "Hi, I would like to find a place to eat in San Jose.",
    "Italian food please, and not too expensive.",
    "That sounds good. Please book a table for 2 people at 7 pm.",
)


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Plays the chat."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        messages: list = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print("user:", question)
            stream = client.chat.completions.create(
                model=model, messages=messages, max_tokens=64, stream=True, stream_options={"include_usage": True}
            )
            print("assistant: ", end="")
            reply = ""
            for chunk in stream:
                for choice in chunk.choices:
                    reply += choice.delta.content or ""
                    print(choice.delta.content or "", end="", flush=True)
                if chunk.usage:
                    cached = chunk.usage.prompt_tokens_details.cached_tokens
                    print(f"\n  [{cached} of {chunk.usage.prompt_tokens} prompt tokens from the cache]")
            messages.append({"role": "assistant", "content": reply})


if __name__ == "__main__":
    main(*sys.argv[1:])
