"""Draft heads with random weights, in the trainer's form and as checkpoints; and a head driven slot by slot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.attention.backends import open_attention
from hiserve.attention.base import AttentionShape
from hiserve.cache.storage.device import DevicePool
from hiserve.core.forward import ForwardInputs, StateRows
from hiserve.core.kv_groups import CacheGroupSpec, CachePlan
from hiserve.models.decoder import attention_shape
from hiserve.models.draft_config import DraftKind, find_draft
from hiserve.models.draft_heads import draft_attention_shape, load_draft
from hiserve.models.loading import load_decoder
from hiserve.models.model_config import read_model_config
from tools.nano.export import hf_config, hf_tensors
from tools.nano.head_files import head_config, published
from tools.nano.heads import Eagle3Head, Head, MTPHead
from tools.nano.model import Nano, NanoConfig

SHAPE = NanoConfig(
    vocab_size=97,
    hidden_size=32,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    rope_theta=1000.0,
    max_positions=256,
)
Row = tuple[int, int, Tensor]  # its number, the place of its first token, its tokens
MAX_LEN = 64
NUM_PAGES = 160


def randomised(module: torch.nn.Module) -> Any:
    """Gives every parameter a size at which nothing of it is lost: also norms, which start as ones."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return module


def make_target(config: NanoConfig = SHAPE) -> Nano:
    """Returns a model in the trainer's form."""
    torch.set_num_threads(1)  # several would wait for each other
    torch.manual_seed(11)
    target: Nano = randomised(Nano(config))
    return target


def make_head(kind: type[Eagle3Head] | type[MTPHead], target: Nano) -> Any:
    """Returns a head in the trainer's form."""
    torch.manual_seed(12)
    return randomised(kind(target)).requires_grad_(False)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Writes a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_target(target: Nano, folder: Path, **overrides: Any) -> Path:
    """Writes a model; overrides are fields of config.json."""
    tensors = {name: target.state_dict()[name.removeprefix("model.")] for name in hf_tensors(target.state_dict())}
    return write(folder, hf_config(target.config) | overrides, tensors)


def save_head(head: Head, folder: Path, config: NanoConfig = SHAPE, **overrides: Any) -> Path:
    """Writes a head as the trainer does, in float32; overrides are fields of config.json."""
    return write(folder, head_config(head, config) | overrides, published(head, config, torch.float32))


def edit(folder: Path, *, drop: Sequence[str] = (), add: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    """Changes a checkpoint: leaves tensors out, puts others in, sets fields of config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | fields
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if name not in drop}
    return write(folder, raw, tensors | (add or {}))


class Paged:
    """A paged pool, NaN wherever nothing was written, and attention over two rows of it.

    Args:
        groups: What is stored.
        shape: Of attention.
        plan: Of a model with several groups.
    """

    def __init__(self, groups: Sequence[CacheGroupSpec], shape: AttentionShape, plan: CachePlan | None = None) -> None:
        torch.set_num_threads(1)
        self.page_size = shape.page_size
        self.attention = open_attention("reference", shape, torch.device("cpu"))
        pool = DevicePool(groups if plan is None else plan.groups, NUM_PAGES, self.page_size, "cpu", num_rows=3)
        pool.storage(groups[0].name).fill_(torch.nan)
        self.layers = pool.layers(groups[0].name) if plan is None else pool.model_layers(plan)
        self._has_states = bool(pool.carried)
        pages = 1 + torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(3))
        self._table = pages[: 2 * (MAX_LEN // self.page_size)].view(2, -1).to(torch.int32)

    def plan(self, rows: Sequence[Row], shift: int = 0) -> ForwardInputs:
        """Plans attention for tokens of rows, with logits of every token; rotary positions are ``shift`` behind."""
        counts = [len(tokens) for _, _, tokens in rows]
        places = torch.cat([torch.arange(first, first + len(tokens)) for _, first, tokens in rows])
        owner = torch.cat([torch.full((len(tokens),), row) for row, _, tokens in rows])
        ends = [first + len(tokens) for _, first, tokens in rows]
        pages = self._table[owner, places // self.page_size].long()
        inputs = ForwardInputs(
            input_ids=torch.cat([tokens for _, _, tokens in rows]).to(torch.int32),
            positions=(places - shift).clamp(min=0),
            slots=pages * self.page_size + places % self.page_size,
            token_rows=torch.repeat_interleave(torch.tensor(counts)),
            qo_indptr=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            kv_lens=torch.tensor(ends),
            page_table=self._table[[row for row, _, _ in rows]],
            logits_rows=torch.arange(sum(counts)),
            q_lens=np.array(counts, dtype=np.int32),
            kv_bounds=np.array(ends, dtype=np.int32),
            max_kv_len=max(ends),
        )
        if self._has_states:
            numbers, starts = (
                torch.tensor([row + 1 for row, _, _ in rows]),
                torch.tensor([first for _, first, _ in rows]),
            )
            none = torch.zeros_like(numbers)
            state = StateRows(numbers, starts, starts, inputs.kv_lens, none, none)
            inputs = dataclasses.replace(inputs, state=state)
        self.attention.plan(inputs)
        return inputs


class Drafter:
    """What drafts, beside its model.

    Args:
        target: Folder of the model.
        kind: Of what drafts.
        source: As ``find_draft`` takes it.
        page_size: Tokens per page.
        load_format: Of what drafts.
        dtype: Type name of weights and pools.
    """

    def __init__(
        self,
        target: Path,
        kind: DraftKind,
        source: Path | None = None,
        *,
        page_size: int = 16,
        load_format: str = "auto",
        dtype: str = "float32",
    ) -> None:
        config = read_model_config(target)
        self.draft = find_draft(kind, None if source is None else str(source), target, config)
        sizes: dict[str, Any] = {"dtype": dtype, "device": "cpu", "max_len": MAX_LEN}
        self.model = load_decoder(target, config, load_format="auto", aux_layers=self.draft.aux_layers, **sizes)
        self.head = load_draft(self.draft, self.model, load_format=load_format, **sizes)
        element = getattr(torch, dtype)
        self._target = Paged(
            config.kv_groups(dtype),
            attention_shape(config, dtype=element, page_size=page_size),
            None if config.delta is None and config.index is None else config.cache_plan(dtype, frees_windows=False),
        )
        self._own = Paged(
            self.head.groups(dtype), draft_attention_shape(self.draft, dtype=element, page_size=page_size)
        )

    @torch.inference_mode()
    def show(self, texts: Sequence[Tensor], chunk: int) -> list[Tensor]:
        """Computes the model's pass over texts in ragged chunks; returns what it shows of the tokens of each."""
        parts: list[list[Tensor]] = [[] for _ in texts]
        for first in range(0, max(map(len, texts)), chunk):
            rows = [(row, first, text[first : first + chunk]) for row, text in enumerate(texts) if first < len(text)]
            out = self.model.forward(self._target.plan(rows), self._target.layers, self._target.attention)
            assert out.hidden_states is not None
            for (row, _, _), shown in zip(rows, out.hidden_states.split([len(row[2]) for row in rows]), strict=True):
                parts[row].append(shown)
        return [torch.cat(part) for part in parts]

    @torch.inference_mode()
    def compute(
        self, rows: Sequence[Row], features: Tensor, before_layer: Callable[[int], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes slots of rows; features are those of the token before each. Returns logits and states of every slot."""
        inputs = dataclasses.replace(self._own.plan(rows, self.head.shift), before_layer=before_layer)
        return self.head.forward(inputs, features, self._own.layers, self._own.attention)


def cycles(sizes: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields steps: of each row in it its number, the tokens stored before, and those computed, one of ``sizes[row]``."""
    first = [0] * len(sizes)
    for step in zip(*sizes, strict=True):
        yield [(row, first[row], num) for row, num in enumerate(step) if num]
        first = [stored + num for stored, num in zip(first, step, strict=True)]
