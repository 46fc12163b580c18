"""Models, prompts, and what transformers makes of them: the tokens every path must give in float64."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer
from torch import Tensor

from hiserve.config.options import make_options
from hiserve.config.serving import Auto
from hiserve.core.plan import RowAdmit
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine.build import build_engine
from hiserve.engine.loop import Engine
from hiserve.ipc.messages import Admit
from hiserve.models.model_config import NANO, find_model
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import sample
from tests.helpers import models
from tests.helpers.models import load_transformers, save_llama, save_qwen3
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.settings import identified

MODELS = ("llama", "qwen3", "nano")
NUM_NEW = 24
NUM_PAGES = 160
MIN_DISTINCT = 20
MAX_LOGIT_DIFFERENCE = 1e-4
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=21)
TEXTS = (
    "def area(width, height):\n    return",
    "I would like a large latte with oat milk, and",
    "Tom has 12 apples. He gives 5 of them to Anna and buys 7 more. How many apples does Tom have now?",
    "Hello! Can you help me find a restaurant for tonight?",
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, prompts for it, and what transformers makes of them.

    Attributes:
        folder: Checkpoint.
        prompts: By row.
        greedy: Tokens that follow each prompt, by row.
        sampled: Tokens drawn after each prompt, by row.
    """

    folder: Path
    prompts: dict[int, list[int]]
    greedy: dict[int, list[int]]
    sampled: dict[int, list[int]]


def next_logits(oracle: Any, tokens: list[int], cache: Any = None) -> tuple[Tensor, Any]:
    """Computes tokens behind those in transformers' cache. Returns the logits after the last, ``[1, vocab_size]``, and the cache.

    transformers calls the cache ``cache`` from 5.24 on, and warns of its former name.
    """
    name = "cache" if "cache" in inspect.signature(type(oracle).forward).parameters else "past_key_values"
    out = oracle(torch.tensor([tokens]), use_cache=True, **{name: cache})
    return out.logits[:, -1], out[name]


@torch.inference_mode()
def continuation(oracle: Any, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    """Generates with transformers' logits and our choice of a token, past any end token."""
    rows = SamplingRows(2, torch.device("cpu"))
    rows.write([RowAdmit(1, np.array(prompt, dtype=np.int32), len(prompt), 0, sampling)])
    tokens, cache = list(prompt), None
    inputs = prompt
    for _ in range(NUM_NEW):
        logits, cache = next_logits(oracle, inputs, cache)
        known = torch.tensor([tokens] * 2, dtype=torch.int32)
        batch = rows.gather(np.array([1], dtype=np.int32), torch.tensor([1]), torch.tensor([len(tokens)]), known)
        tokens.append(int(sample(logits, batch)))
        inputs = tokens[-1:]
    return tokens[len(prompt) :]


def prompts_of(name: str, folder: Path) -> list[list[int]]:
    """Ragged prompts: shorter than a page, of whole pages, longer."""
    if name == "nano":
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return [tokenizer.encode(text).ids for text in TEXTS]
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in (3, 16, 33, 70)]


def make_subject(name: str, folder: Path) -> Subject:
    """Saves a random model into ``folder`` or takes the embedded one, and asks transformers."""
    if name == "nano":
        folder = find_model(NANO)
    else:
        (save_llama if name == "llama" else save_qwen3)(folder)
    oracle = load_transformers(folder, torch.float64)
    prompts = dict(enumerate(prompts_of(name, folder), start=1))
    return Subject(
        folder,
        prompts,
        greedy={row: continuation(oracle, prompt) for row, prompt in prompts.items()},
        sampled={row: continuation(oracle, prompt, SAMPLED) for row, prompt in prompts.items()},
    )


def engine_of(
    subject: Subject,
    *,
    chunk: int = 64,
    depth: int = 0,
    page_size: int = 4,
    kv_pages: int = 200,
    window_pages: int | Auto = "auto",
    device: str = "cpu",
    spec: str = "off",
) -> Engine:
    """The engine as ``hiserve serve`` builds it, in float64; its pages may be fewer than the longest request has."""
    max_len = 160
    settings = identified(
        make_options(
            model=str(subject.folder),
            dtype="float64",
            device=device,
            max_model_len=max_len,
            kv_pages=max(kv_pages, 1 + max_len // page_size),
            window_pages=window_pages,
            page_size=page_size,
            max_running_requests=8,
            max_batched_tokens=chunk,
            overlap=depth,
            graphs="off" if device == "cpu" else "all",
            cpu_threads=1,
            spec=spec,
        )
    )
    return build_engine(replace(settings, cache=replace(settings.cache, kv_pages=kv_pages)))


def generate(engine: Engine, prompts: dict[int, list[int]], sampling: SamplingParams = GREEDY) -> dict[int, list[int]]:
    """Adds all prompts at once, runs until nothing is left to do, and checks how each ended."""
    limited = msgspec.structs.replace(sampling, max_tokens=NUM_NEW, ignore_eos=True)
    for uid, prompt in prompts.items():
        admit = Admit(uid=uid, num_prompt=len(prompt), sampling=limited, namespace=b"", choice=0)
        engine.add(admit, np.array(prompt, dtype=np.int32))
    out: dict[int, list[int]] = {uid: [] for uid in prompts}
    ends: dict[int, int] = {}
    while engine.has_work:
        updates = engine.step()
        if updates is None:
            continue
        assert not updates.failed
        parts = np.split(updates.tokens, np.cumsum(updates.counts, dtype=np.int64))[:-1]
        for uid, part, finish in zip(updates.uids, parts, updates.finishes, strict=True):
            out[uid] += part.tolist()
            if finish:
                assert uid not in ends
                ends[uid] = finish
    assert ends == dict.fromkeys(prompts, FinishReason.LENGTH)
    assert engine.stats().stale_rows == 0
    return out


def check_logits(oracle: Any, engine: models.Engine, prompts: dict[int, list[int]]) -> None:
    """Ragged chunks of all prompts at once, in scattered pages of 16 tokens; the engine has ``NUM_PAGES``."""
    logits = engine.logits(HandPlanner(16, NUM_PAGES, shuffle_seed=5), prompts, chunk=9)
    for row, prompt in prompts.items():
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt])).logits[0]
        assert logits[row].shape == expected.shape
        assert (logits[row] - expected).abs().max().item() <= MAX_LOGIT_DIFFERENCE


def check_tokens(
    subject: Subject,
    chunk: int,
    depth: int,
    *,
    page_size: int = 4,
    window_pages: int | Auto = "auto",
    spec: str = "off",
    watch: Callable[[Engine], object] = lambda engine: None,
) -> Engine:
    """Continuous batches in chunks, and once more over what the first pass left in the cache; ``watch`` sees the engine first.

    Returns the engine, which goes on.
    """
    assert len({token for tokens in subject.greedy.values() for token in tokens}) >= MIN_DISTINCT
    engine = engine_of(subject, chunk=chunk, depth=depth, page_size=page_size, window_pages=window_pages, spec=spec)
    watch(engine)
    assert generate(engine, subject.prompts) == subject.greedy
    total = sum(len(prompt) + NUM_NEW - 1 for prompt in subject.prompts.values())
    assert spec != "off" or engine.stats().steps >= -(-total // chunk)
    assert engine.stats().cached_tokens == 0
    assert generate(engine, subject.prompts) == subject.greedy
    cached = sum((len(prompt) - 1) // page_size * page_size for prompt in subject.prompts.values())
    assert engine.stats().cached_tokens == cached > 0
    return engine
