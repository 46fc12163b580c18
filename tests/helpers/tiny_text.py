"""Small tokenizers and a chat template, built here so that text tests need no model folder."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hiserve.text.tokens.tokenizer import Tokenizer

BOS, END, SYSTEM, USER, ASSISTANT = range(5)
SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = [
    "I would like a small coffee with milk and sugar please.",
    "The reservation is for two people at seven tonight, thank you.",
    "the token of the tokenizer is a token of the tokenized text",
    "größer naïve façade — “quotes” … 日本語 中文 한국어 🙂🙃 👩‍👩‍👧",
] * 4
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|assistant|>' -}}{% endif -%}
"""
TRIMMING_TEMPLATE = TEMPLATE.replace("message['content']", "message['content'] | trim")


def byte_level_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE with every byte, five special tokens and one added token that is not special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think> 日", special=False, normalized=False)])
    return backend


def byte_level() -> Tokenizer:
    """The tokenizer over ``byte_level_backend``; its end token is ``<|end|>``."""
    return Tokenizer(byte_level_backend(), eos_token_ids=[END])


def with_start_token() -> Tokenizer:
    """The same, with ``<|bos|>`` put in front of every text."""
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return Tokenizer(backend, eos_token_ids=[END])


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like BPE: spaces as marks, bytes of unknown characters as tokens."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["▁", "▁t", "th", "é", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "t"), ("t", "h"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, eos_token_ids=[2])


def with_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    """Tokens in the spellings of several families, and a decoder that reads some of them."""
    tokens = ["[UNK]", "[CLS]", "up", "##on", "▁hi", "▁", "▁▁", "lo</w>", ".", " ", "é", "n't"]
    tokens += ["<0xE2>", "<0x82>", "<0xAC>", "<0x41>"]
    backend = tokenizers.Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    backend.decoder = decoder
    backend.add_special_tokens(["[UNK]", "[CLS]"])
    return Tokenizer(backend)


def spell_in_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that decode to the text one byte a token: never what the tokenizer itself would choose."""
    byte_ids = {
        tokenizer.decode([index]): index for index, token in tokenizer.vocab.items() if len(token) == 1 and index > END
    }
    return [byte_ids[char] for char in text]
