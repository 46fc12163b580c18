"""Runs the embedded model without a server: a batch of texts, and a conversation of two turns.

Run ``python examples/offline.py``.
"""

from __future__ import annotations

from hiserve import LLM, SamplingParams


def main() -> None:
    """Generates."""
    with LLM("hiserve-nano", in_process=True, log_level="warning") as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=32)
        for result in llm.generate(["def add(a, b):\n", "Would you like"], greedy):
            print(repr(result.prompt), "->", repr(result.outputs[0].text))

        conversation = [{"role": "user", "content": "I would like to find a place to eat in San Jose."}]
        (reply,) = llm.chat(conversation, greedy)
        print("assistant:", reply.outputs[0].text)
        conversation += [
            {"role": "assistant", "content": reply.outputs[0].text},
            {"role": "user", "content": "Italian food, please."},
        ]
        (reply,) = llm.chat(conversation, greedy)
        print("assistant:", reply.outputs[0].text)
        print(f"[{reply.num_cached_tokens} of {len(reply.prompt_token_ids)} prompt tokens from the cache]")


if __name__ == "__main__":
    main()
