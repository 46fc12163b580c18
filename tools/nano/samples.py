"""Sample dialogues: fixed user turns, greedy replies; each reply's tokens stand verbatim in the next prompt."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.llama import LlamaForCausalLM

MAX_REPLY_TOKENS = 200

SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "restaurant": (
        "",
        (
            "I would like to find a place to eat in San Jose.",
            "Italian food please.",
            "That sounds good. Please book a table for 2 people at 7 pm.",
            "Yes, that is right.",
            "What is their phone number?",
            "Thank you, that is all.",
        ),
    ),
    "coffee": (
        "You are a barista. Take the customer's order.",
        (
            "Hi, can I get a large latte with oat milk?",
            "Can you make it decaf?",
            "Yes, that looks right.",
            "Thanks, bye!",
        ),
    ),
    "trip": (
        "You are a helpful assistant.",
        (
            "I need a hotel in London for next week.",
            "3 days from March 4th, for one person.",
            "How much does it cost?",
            "Ok, please book it.",
            "Yes. Could you also find me a taxi there?",
            "For one person please.",
        ),
    ),
    "salon": (
        "",
        (
            "I want to book a hair salon appointment in Berkeley.",
            "Tomorrow at 2 pm.",
            "Yes, go ahead.",
            "No, thanks. Goodbye.",
        ),
    ),
    "math": (
        "",
        (
            "Tom has 3 boxes with 4 apples each. He eats 2 apples. How many apples are left?",
            "Anna buys 5 books for $6 each and pays with $50. How much change does she get?",
        ),
    ),
    "python": (
        "",
        ("Write a Python function is_empty(self). Return True if the queue is empty.",),
    ),
}
COMPLETIONS = ("import os\nimport sys\n\ndef main(argv):\n", "class Stack:\n    def __init__(self):\n")


@dataclass(frozen=True, slots=True)
class Sample:
    """A dialogue as (role, content) turns."""

    name: str
    turns: list[tuple[str, str]]

    def transcript(self) -> str:
        """One line a turn."""
        return "\n".join(f"{role}: {content}" for role, content in self.turns)


@torch.no_grad()
def greedy(model: LlamaForCausalLM, ids: list[int], limit: int) -> list[int]:
    """Greedy continuation of a prompt, up to and with the end token."""
    prompt = torch.tensor([ids], device=model.device)
    out = model.generate(  # type: ignore[misc]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=limit,
        do_sample=False,
        temperature=None,
        top_p=None,
    )
    return [int(token) for token in out[0, len(ids) :]]


def run_dialogue(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, system: str, users: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Holds one dialogue; returns its turns."""
    turns = [("system", system)] if system else []
    ids = list(tokenizer.encode(f"<|bos|><|system|>{system}<|end|>" if system else "<|bos|>"))
    for user in users:
        ids += tokenizer.encode(f"<|user|>{user}<|end|><|assistant|>")
        reply = greedy(model, ids, MAX_REPLY_TOKENS)
        ids += reply if reply[-1] == tokenizer.eos_token_id else [*reply, tokenizer.eos_token_id]
        turns += [("user", user), ("assistant", str(tokenizer.decode(reply, skip_special_tokens=True)))]
    return turns


def run_samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[Sample]:
    """Runs every script, and two plain Python completions."""
    samples = [Sample(name, run_dialogue(model, tokenizer, *script)) for name, script in SCRIPTS.items()]
    for text in COMPLETIONS:
        reply = greedy(model, list(tokenizer.encode("<|bos|>" + text)), MAX_REPLY_TOKENS)
        samples.append(Sample("completion", [("prompt", text), ("continuation", str(tokenizer.decode(reply)))]))
    return samples
