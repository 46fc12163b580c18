"""The tokenizer: byte-level BPE of 4096 tokens, its special tokens and the chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.nano.sources import Document

VOCAB_SIZE = 4096
MAX_LENGTH = 8192
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|tool|>"}
# Ids are the places in this tuple: 0, 1, 2, ...
SPECIAL_TOKENS = (BOS, END, PAD, *ROLE_TOKENS.values())

# Words take the one character before them; digits stand alone, so that numbers are written digit by digit; runs of
# spaces stay whole, so that an indentation is one or two tokens.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

# Contents stand between special tokens exactly as given: nothing is trimmed, nothing is added.
CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- if tools -%}
  {{- '<|system|>' -}}
  {%- if messages and messages[0]['role'] == 'system' -%}
    {{- messages[0]['content'] + '\\n\\n' -}}
    {%- set messages = messages[1:] -%}
  {%- endif -%}
  {{- 'Tools:\\n' -}}
  {%- for tool in tools -%}
    {{- tool['function'] | default(tool) | tojson + '\\n' -}}
  {%- endfor -%}
  {{- 'Call:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
    {{- raise_exception('hiserve-nano knows the roles system, user, assistant and tool') -}}
  {%- endif -%}
  {{- '<|' + message['role'] + '|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] if part['type'] == 'text' -%}
      {{- part['text'] -}}
    {%- endfor -%}
  {%- endif -%}
  {%- for call in message['tool_calls'] or [] -%}
    {%- set arguments = call['function']['arguments'] -%}
    {{- '\\n' if message['content'] or not loop.first else '' -}}
    {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' -}}
    {{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def special_id(token: str) -> int:
    """Id of a special token."""
    return SPECIAL_TOKENS.index(token)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains the tokenizer.

    Args:
        texts: Training texts, without special tokens. Repeating one raises its weight.

    Returns:
        A tokenizer with ids 0..6 for the special tokens and all 256 bytes in its alphabet, so that every text
        survives encoding and decoding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def encode_body(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Token ids of a document after ``<|bos|>`` and its system message, as the chat template writes them."""
    end = special_id(END)
    if document.text:
        return [*tokenizer.encode(document.text).ids, end]
    ids: list[int] = []
    for role, content in document.messages:
        ids += [special_id(ROLE_TOKENS[role]), *tokenizer.encode(content).ids, end]
    return ids


def encode_head(tokenizer: Tokenizer, system: str) -> list[int]:
    """Token ids of ``<|bos|>`` and the system message; an empty string means that there is none."""
    head = [special_id(BOS)]
    if system:
        head += [special_id(ROLE_TOKENS["system"]), *tokenizer.encode(system).ids]
        head.append(special_id(END))
    return head


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLE_TOKENS.values()),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
