"""Draft heads against the trainer's own form, driven slot by slot over pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiserve.models.draft_config import DraftKind, find_draft
from hiserve.models.model_config import read_model_config
from tests.helpers.draft_heads import (
    SHAPE,
    Drafter,
    cycles,
    edit,
    make_head,
    make_target,
    save_head,
    save_target,
    write,
)
from tools.nano.head_files import head_config, published
from tools.nano.heads import AUX_LAYERS, Eagle3Head, MTPHead, Seen, observe, unroll
from tools.nano.model import Nano, RMSNorm

SHAPE_WIDE = dataclasses.replace(SHAPE, hidden_size=64)
NUM_DRAFT = 3
FIRST = 96  # a token that stands second in every text, and nowhere else
# Tokens that each of two rows computes in each step; none is a row that is not in it.
SIZES = ((5, 1, 3, 0, 4, 1), (1, 16, 2, 4, 1, 9))


class NormedFirst(Eagle3Head):
    """EAGLE-3 as speculators may train it: normed before ``fc``, and normed before the residual stream."""

    def __init__(self, target: Nano) -> None:
        super().__init__(target)
        self.input_norm = RMSNorm(self.fc.in_features, target.config.norm_eps)

    def first(self, seen: Seen) -> Tensor:
        fused: Tensor = self.fc(self.input_norm(seen.aux))
        return fused

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.midlayer.hidden_norm(state)
        return torch.cat((self.midlayer.input_layernorm(embedded), normed), -1), normed


class MiMoHead(MTPHead):
    """MTP as MiMo has it: biases, and the state before the embedding."""

    def __init__(self, target: Nano) -> None:
        super().__init__(target)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(self.layer.self_attn, name)
            setattr(self.layer.self_attn, name, nn.Linear(plain.in_features, plain.out_features))

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.eh_proj(torch.cat((self.hnorm(state), self.enorm(embedded)), dim=-1))
        return self.layer.input_layernorm(stream), stream


Checkpoint = tuple[Any, DraftKind, Path, Path | None]  # the trainer's head, kind, the model's folder, the head's own


def specforge(folder: Path) -> Checkpoint:
    target = make_target()
    head = make_head(Eagle3Head, target)
    return head, "eagle3", save_target(target, folder / "target"), save_head(head, folder / "head")


def original(folder: Path) -> Checkpoint:
    head, kind, target, place = specforge(folder)
    assert place is not None
    return head, kind, target, edit(place, architectures=["LlamaForCausalLM"], eagle_config=None)


def speculators(folder: Path) -> Checkpoint:
    target = make_target()
    head = make_head(NormedFirst, target)
    config = head_config(head, SHAPE)
    layer = {name: config.pop(name) for name in list(config) if name not in ("draft_vocab_size", "target_hidden_size")}
    layer["model_type"] = "llama"
    raw = config | {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    }
    tensors = published(head, SHAPE, torch.float32)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return head, "eagle3", save_target(target, folder / "target"), write(folder / "head", raw, renamed)


def deepseek(folder: Path) -> Checkpoint:
    target = make_target()
    head = make_head(MTPHead, target)
    return head, "mtp", save_target(target, folder / "target"), save_head(head, folder / "head")


def deepseek_in_the_model(folder: Path) -> Checkpoint:
    target = make_target()
    head = make_head(MTPHead, target)
    place = save_target(target, folder / "target")
    copy = {"model.layers.8.embed_tokens.weight": target.embed_tokens.weight.detach()}
    edit(place, add=published(head, SHAPE, torch.float32) | copy, num_nextn_predict_layers=1)
    return head, "mtp", place, None


def mimo(folder: Path) -> Checkpoint:
    target = make_target()
    head = make_head(MiMoHead, target)
    place = save_target(target, folder / "target", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    torch.manual_seed(5)
    sizes = {"q_proj": SHAPE.num_heads, "k_proj": SHAPE.num_kv_heads, "v_proj": SHAPE.num_kv_heads}
    biases = {
        f"model.layers.{layer}.self_attn.{name}.bias": torch.randn(count * SHAPE.head_dim)
        for layer in range(SHAPE.num_layers)
        for name, count in sizes.items()
    }
    names = {
        "enorm.": "token_layernorm.",
        "hnorm.": "hidden_layernorm.",
        "eh_proj.": "input_proj.",
        "shared_head.norm.": "final_layernorm.",
    }
    for name, tensor in published(head, SHAPE, torch.float32).items():
        inner = name.removeprefix("model.layers.8.")
        for theirs, its in names.items():
            inner = inner.replace(theirs, its)
        biases["model.mtp_layers.0." + inner] = tensor
    return head, "mtp", edit(place, add=biases), None


FORMATS: dict[str, Callable[[Path], Checkpoint]] = {
    "specforge": specforge,
    "original": original,
    "speculators": speculators,
    "deepseek": deepseek,
    "deepseek in the model": deepseek_in_the_model,
    "mimo": mimo,
}


@pytest.fixture(params=FORMATS, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return FORMATS[request.param](tmp_path_factory.mktemp("draft"))


def some_texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(21)
    texts = [torch.randint(FIRST, (length,), generator=generator) for length in (20, 40)]
    for text in texts:
        text[1] = FIRST
    return texts


@torch.no_grad()
def unrolled(head: Any, embedding: Tensor, text: Tensor, shown: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and states of each step of the trainer's chains, by the row that they begin at."""
    states: list[Tensor] = []
    leave = head.leave

    def keep(stream: Tensor) -> tuple[Tensor, Tensor]:
        state, normed = leave(stream)
        states.append(state[0])
        return state, normed

    seen, read = Seen(aux=shown[None], last=shown[None]), embedding
    if isinstance(head, MiMoHead):  # the embedding of the second token, whose position is 0, counts as zero
        read = embedding.clone()
        read[FIRST] = 0
    head.leave = keep
    try:
        logits = [
            F.linear(normed[0], head.output_weight(embedding))
            for normed in unroll(head, read, text[None], seen, NUM_DRAFT)
        ]
    finally:
        head.leave = leave
    return logits, states


@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_and_states_of_chains_are_the_trainers(checkpoint: Checkpoint, page_size: int) -> None:
    head, kind, target, source = checkpoint
    drafter = Drafter(target, kind, source, page_size=page_size)
    texts, embedding = some_texts(), make_target().embed_tokens.weight.detach()
    shown = drafter.show(texts, chunk=9)
    expected = [unrolled(head, embedding, *each) for each in zip(texts, shown, strict=True)]
    nothing = torch.full((1, drafter.head.feature_size), torch.nan)
    features = [torch.cat((nothing, drafter.head.fuse(each))) for each in shown]  # of the token before each

    def check(row: int, begin: int, step: int, logits: Tensor, state: Tensor) -> None:
        for found, wanted in zip((logits, state), expected[row], strict=True):
            torch.testing.assert_close(found, wanted[step][begin], rtol=1e-5, atol=1e-5)

    num_chains = 0
    for rows in cycles(SIZES):
        slots = [(row, first, texts[row][first : first + num + 1]) for row, first, num in rows]
        before = torch.cat([features[row][first : first + num + 1] for row, first, num in rows])
        logits, states = drafter.compute(slots, before)
        places = [(row, place) for row, first, num in rows for place in range(first, first + num + 1)]
        for (row, place), *found in zip(places, logits, states, strict=True):
            if place:
                check(row, place - 1, 0, *found)
        last = torch.tensor([num + 1 for _, _, num in rows]).cumsum(0) - 1
        carried = states[last]
        for step in range(1, NUM_DRAFT):
            behind = [(row, first + num + step, texts[row][first + num + step :][:1]) for row, first, num in rows]
            logits, carried = drafter.compute(behind, carried)
            for (row, first, num), *found in zip(rows, logits, carried, strict=True):
                check(row, first + num - 1, step, *found)
                num_chains += 1
    assert num_chains == 22


def test_a_head_sees_the_layers_that_the_trainer_showed_it(tmp_path: Path) -> None:
    for make, part in ((specforge, "aux"), (deepseek, "last")):
        _, kind, target, source = make(tmp_path / part)
        texts = some_texts()
        for text, shown in zip(texts, Drafter(target, kind, source).show(texts, chunk=9), strict=True):
            wanted = getattr(observe(make_target(), text[None]), part)[0]
            torch.testing.assert_close(shown, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "aux_layers"),
    [
        ("specforge", AUX_LAYERS),
        ("original", (1, 3, 4)),
        ("speculators", (1, 3, 5)),
        ("deepseek", (8,)),
        ("mimo", (7,)),
    ],
)
def test_which_layers_a_format_sees(tmp_path: Path, name: str, aux_layers: tuple[int, ...]) -> None:
    _, kind, target, source = FORMATS[name](tmp_path)
    found = find_draft(kind, None if source is None else str(source), target, read_model_config(target))
    assert (found.aux_layers, found.shift, found.feature_size) == (aux_layers, 1, SHAPE.hidden_size)


def first_logits(drafter: Drafter, text: Tensor) -> Tensor:
    """Logits of slots 1 to 9, each of which knows of the slots before."""
    fused = drafter.head.fuse(drafter.show([text], chunk=50)[0])
    return drafter.compute([(0, 1, text[1:10])], fused[:9])[0]


def test_a_smaller_vocabulary_is_spread_over_the_models(tmp_path: Path) -> None:
    head, kind, target, place = specforge(tmp_path)
    assert place is not None
    text = some_texts()[0]
    full = first_logits(Drafter(target, kind, place), text)
    tokens = torch.tensor([3, 4, 9, 50, 96])
    reduced = {"d2t": tokens - torch.arange(5), "lm_head.weight": head.lm_head.weight[tokens]}
    edit(place, add=reduced, draft_vocab_size=5)
    found = first_logits(Drafter(target, kind, place), text)
    assert found.shape == full.shape
    torch.testing.assert_close(found[:, tokens], full[:, tokens], rtol=1e-5, atol=1e-5)
    others = torch.ones(97, dtype=torch.bool).index_fill_(0, tokens, 0)
    assert (found[:, others] == -torch.inf).all()


def test_a_head_may_bring_its_own_embedding(tmp_path: Path) -> None:
    _, kind, target, place = specforge(tmp_path)
    assert place is not None
    text, own = some_texts()[0], make_target().embed_tokens.weight.detach().clone()
    without = Drafter(target, kind, place)
    shared = first_logits(without, text)
    edit(place, add={"embed_tokens.weight": own})
    with_copy = Drafter(target, kind, place)
    assert torch.equal(first_logits(with_copy, text), shared)
    assert with_copy.draft.num_params == without.draft.num_params + own.numel()
    own[text[3]] += 1.0
    edit(place, add={"embed_tokens.weight": own})
    found = first_logits(Drafter(target, kind, place), text)
    assert torch.equal(found[:2], shared[:2])
    assert not torch.isclose(found[2], shared[2]).all()


def test_a_wider_models_states_are_fused_to_the_heads_width(tmp_path: Path) -> None:
    """With its own embedding a head may be narrower than the model."""
    wide = make_target(SHAPE_WIDE)
    target = save_target(wide, tmp_path / "target")
    narrow = make_head(Eagle3Head, make_target())
    fuse = {"fc.weight": torch.randn(32, 3 * 64), "embed_tokens.weight": torch.randn(97, 32)}
    place = edit(save_head(narrow, tmp_path / "head"), add=fuse, target_hidden_size=64)
    assert first_logits(Drafter(target, "eagle3", place), some_texts()[0]).isfinite().all()


def test_drawn_weights_need_no_files_but_config_json(tmp_path: Path) -> None:
    for make in (specforge, deepseek):
        _, kind, target, place = make(tmp_path / make.__name__)
        assert place is not None
        (place / "model.safetensors").unlink()
        drafter = Drafter(target, kind, place, load_format="dummy")
        assert first_logits(drafter, some_texts()[0]).isfinite().all()


def test_a_layer_waits_until_its_keys_and_values_are_there(tmp_path: Path) -> None:
    for make in (specforge, deepseek):
        _, kind, target, place = make(tmp_path / make.__name__)
        drafter, waited = Drafter(target, kind, place), list[int]()
        drafter.compute([(0, 1, some_texts()[0])], torch.zeros((20, SHAPE.hidden_size)), waited.append)
        assert waited == [0]


def test_a_small_model_drafts_what_it_says_itself(tmp_path: Path) -> None:
    target = save_target(make_target(), tmp_path / "target")
    drafter = Drafter(target, "draft_model", target)
    assert (drafter.head.aux_layers, drafter.head.shift, drafter.head.feature_size) == ((), 0, 0)
    assert [group.name for group in drafter.head.groups("float32")] == ["draft"]
    text = some_texts()[0]
    logits, states = drafter.compute([(0, 0, text[:12])], torch.empty((12, 0)))
    later, _ = drafter.compute([(0, 12, text[12:])], states[:8])
    nano = make_target()
    with torch.no_grad():
        wanted = nano.logits(nano(text[None]))[0]
    torch.testing.assert_close(torch.cat((logits, later)), wanted, rtol=1e-5, atol=1e-5)
