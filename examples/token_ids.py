"""Speaks token ids with a running server: the way of agents that keep a conversation as tokens.

The second request goes on from the sampled tokens themselves, so that it hits the prefix cache whatever their text
would be tokenized to. Start ``hiserve serve`` and run ``python examples/token_ids.py [URL]``.
"""

from __future__ import annotations

import sys

import httpx


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Generates twice."""
    with httpx.Client(base_url=url, timeout=60.0) as client:

        def post(path: str, **body: object) -> dict:
            return client.post(path, json=body).raise_for_status().json()

        tokens = post("/tokenize", messages=[{"role": "user", "content": "Book a table for two, please."}])["tokens"]
        for _ in range(2):
            reply = post("/v1/completions", prompt=tokens, max_tokens=24, return_token_ids=True, ignore_eos=True)
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            tokens += reply["choices"][0]["token_ids"]
            print(f"[{cached} of {reply['usage']['prompt_tokens']} prompt tokens from the cache]")
        print(tokens)
        print(post("/detokenize", tokens=tokens)["prompt"])


if __name__ == "__main__":
    main(*sys.argv[1:])
