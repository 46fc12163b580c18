"""A widened model says what the narrow one says, and computes all that it has more."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.drive import Drive
from benchmarks.widen import Places, Widened, widen, widen_head, write, write_head, write_shards
from hiserve import LLM, SamplingParams
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.checkpoint import INDEX
from hiserve.models.draft_config import DraftKind, find_draft
from hiserve.models.model_config import NANO, ModelConfig, find_model, read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.draft_heads import Drafter, make_head, save_head
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.widening import in_turn
from tools.nano.head_files import load_target
from tools.nano.heads import Eagle3Head, MTPHead
from tools.nano.model import NanoConfig

FOLDER = find_model(NANO)
NARROW_VOCAB = 4096
SEED = 3
CPU = torch.device("cpu")
# No ratio to nano is a whole number, but that of head_dim.
MINI: dict[str, Any] = {
    "vocab_size": 5000,
    "hidden_size": 384,
    "intermediate_size": 800,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EXTRA = (2, 5, 8, 11)
TEXTS = (
    "Hi, can I get a latte with oat milk?",
    "I would like to find a place to eat in San Jose.",
    "Tom has 3 boxes of 12 apples. He sells 7. How many are left?",
    "Write a Python function that reads a file and counts its lines.",
)
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "kv_pages": 64, "host_cache_gib": 0}
ENGINE |= {"max_running_requests": 4, "max_model_len": 256, "max_batched_tokens": 64, "spec": "off"}
LOUDLY = -1e4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return [
        tokenizer.encode(f"<|bos|><|user|>{text}<|end|><|assistant|>", add_special_tokens=False).ids for text in TEXTS
    ]


@pytest.fixture(scope="module")
def widened() -> Widened:
    return widen(FOLDER, MINI, SEED)


@pytest.fixture(scope="module")
def wide_folder(widened: Widened) -> Iterator[Path]:
    """The miniature in float64, gone with the tests: pytest would keep hundreds of megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        write(widened, torch.float64, CPU, Path(folder))
        yield Path(folder)


@pytest.fixture
def empty_folder() -> Iterator[Path]:
    """Likewise, for another one."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def logits_of(folder: Path, dtype: str, prompts: list[list[int]]) -> tuple[list[Tensor], Engine]:
    """Logits of every position of the prompts, and the engine that computed them."""
    engine = Engine(folder, dtype=dtype)
    logits = engine.logits(HandPlanner(16, 64), dict(enumerate(prompts, 1)), chunk=16)
    return list(logits.values()), engine


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-9)])
def test_logits_are_those_of_the_narrow_model_and_padded_tokens_are_out_of_reach(
    dtype: str, tolerance: float, wide_folder: Path, prompts: list[list[int]]
) -> None:
    narrow, _ = logits_of(FOLDER, dtype, prompts)
    wide, _ = logits_of(wide_folder, dtype, prompts)
    for expected, found in zip(narrow, wide, strict=True):
        torch.testing.assert_close(found[:, :NARROW_VOCAB], expected, atol=tolerance, rtol=0)
        assert found[:, NARROW_VOCAB:].max() < LOUDLY


@torch.inference_mode()
def test_a_tied_head_cannot_reach_padded_tokens_either(empty_folder: Path, prompts: list[list[int]]) -> None:
    write(widen(FOLDER, MINI | {"tie_word_embeddings": True}, SEED), torch.float32, CPU, empty_folder)
    assert read_model_config(empty_folder).tie_embeddings
    (expected,), (found,) = (logits_of(folder, "float32", prompts[:1])[0] for folder in (FOLDER, empty_folder))
    torch.testing.assert_close(found[:, :NARROW_VOCAB], expected, atol=1e-4, rtol=0)
    assert found[:, NARROW_VOCAB:].max() < LOUDLY


def test_bfloat16_is_as_close_as_its_rounding(empty_folder: Path, widened: Widened, prompts: list[list[int]]) -> None:
    write(widened, torch.bfloat16, CPU, empty_folder)
    (expected,), (found,) = (logits_of(folder, "bfloat16", prompts[:1])[0] for folder in (FOLDER, empty_folder))
    distance = (found[:, :NARROW_VOCAB] - expected).float().square().mean().sqrt()
    assert distance < 0.03 * expected.float().std()
    assert found[:, NARROW_VOCAB:].max() < LOUDLY


def test_an_engine_that_starts_from_the_folder_gives_the_same_greedy_tokens(
    wide_folder: Path, prompts: list[list[int]]
) -> None:
    replies = []
    for model in (FOLDER, wide_folder):
        drive = Drive(model=str(model), **ENGINE)
        seen = [drive.add(torch.tensor(prompt, dtype=torch.int32).numpy(), 32) for prompt in prompts]
        drive.finish(*seen)
        replies.append([each.tokens for each in seen])
        drive.close()
    assert replies[0] == replies[1]
    assert [len(reply) for reply in replies[1]] == [32] * len(prompts)


def test_a_hot_sampler_draws_what_it_draws_of_the_narrow_model_and_no_padded_token(
    wide_folder: Path, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=1.0, top_k=-1, seed=11, max_tokens=24, ignore_eos=True)
    drawn = []
    for model in (FOLDER, wide_folder):
        with LLM(model, in_process=True, **ENGINE) as llm:
            outputs = llm.generate(prompts, sampling)
        drawn.append([output.outputs[0].token_ids for output in outputs])
    assert drawn[0] == drawn[1]
    assert max(token for reply in drawn[1] for token in reply) < NARROW_VOCAB


def test_extra_layers_compute_and_add_nothing(wide_folder: Path, prompts: list[list[int]], widened: Widened) -> None:
    assert sorted({*range(12)} - {*widened.places.layers}) == list(EXTRA)
    config = read_model_config(wide_folder)
    made = load_parameters(wide_folder, config, torch.float32, CPU, "auto")
    for layer in EXTRA:
        assert made[f"layers.{layer}.qkv"].std() == pytest.approx(0.02, rel=0.02)
        assert made[f"layers.{layer}.gate_up"].std() == pytest.approx(0.02, rel=0.02)
        assert made[f"layers.{layer}.qkv"].ne(0).all()
        assert not made[f"layers.{layer}.out"].any()
        assert not made[f"layers.{layer}.down"].any()
    _, engine = logits_of(wide_folder, "float32", prompts[:1])
    kept = [torch.cat((kv.k[16:], kv.v[16:])) for kv in engine.pool.layers("kv")]  # of all pages but the sink
    assert all(kept[layer].count_nonzero() >= 0.99 * len(prompts[0]) * 2 * 3 * 128 for layer in EXTRA)


def test_heads_and_neurons_that_nobody_reads_cost_as_much_as_others(widened: Widened, wide_folder: Path) -> None:
    made = load_parameters(wide_folder, read_model_config(wide_folder), torch.float32, CPU, "auto")
    axes = widened.places.axes
    for name, axis in (("qkv", axes["queries"]), ("gate_up", axes["inner"])):
        free = torch.ones(axis.size, dtype=torch.bool).index_fill_(0, axis.taken, False)
        assert made[f"layers.0.{name}"][: axis.size][free].ne(0).all()
        assert free.sum() > 0


def test_another_seed_draws_other_weights(widened: Widened) -> None:
    name, sizes = "model.layers.2.self_attn.q_proj.weight", (9 * 128, 384)
    first, again, other = (torch.empty(sizes) for _ in range(3))
    for each, out in ((widened, first), (widened, again), (widen(FOLDER, MINI, SEED + 1), other)):
        each.filler.fill(name, out, None)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_files_are_as_large_as_they_may_be(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((size,), float(number)) for number, size in enumerate((4, 4, 9, 2, 3))}
    write_shards(iter(tensors.items()), tmp_path, shard_bytes=32)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert [list(places.values()).count(file) for file in sorted(set(places.values()))] == [2, 1, 2]
    for name, file in places.items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_a_model_that_does_not_fit_is_refused() -> None:
    narrow = read_model_config(FOLDER)
    wide = widen(FOLDER, MINI, SEED).config
    cases: dict[str, dict[str, Any]] = {
        "hidden_size of the wide model is 256, and must be 257": {"hidden_size": 256},
        "vocab_size of": {"vocab_size": 4000},
        "query heads of a key head of": {"num_heads": 3},
        "head_dim 96 is no multiple of 64": {"head_dim": 96},
        "frequencies differ": {"rope": msgspec.structs.replace(wide.rope, theta=1e4)},
        "plain Llama": {"has_qk_norm": True},
    }
    for message, change in cases.items():
        with pytest.raises(ValueError, match=message):
            Places(narrow, msgspec.structs.replace(wide, **change))


def test_a_dtype_without_room_for_what_hides_padded_tokens_is_refused(widened: Widened) -> None:
    with pytest.raises(ValueError, match=r"cannot be torch\.float16"):
        widened.filler.fill("model.norm.weight", torch.empty(384, dtype=torch.float16), None)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[DraftKind, Path]:
    """Random heads of nano, of which no norm is 1."""
    folder, target = tmp_path_factory.mktemp("heads"), load_target(FOLDER, CPU)
    kinds: dict[DraftKind, type[Eagle3Head] | type[MTPHead]] = {"eagle3": Eagle3Head, "mtp": MTPHead}
    return {kind: save_head(make_head(form, target), folder / kind, NanoConfig()) for kind, form in kinds.items()}


def drafted(drafter: Drafter, text: Tensor) -> Tensor:
    """Logits ``[T - 1, vocab]`` of slots 1 to T - 1, the last two of them drafted one by one with states of the head's own."""
    last = len(text) - 2
    features = drafter.head.fuse(drafter.show([text], chunk=16)[0])
    logits, states = drafter.compute([(0, 1, text[1:last])], features[: last - 1])
    parts = [logits]
    for slot in (last, last + 1):
        logits, states = drafter.compute([(0, slot, text[slot : slot + 1])], states[-1:])
        parts.append(logits)
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("drafts", "numbers"),
    in_turn([("eagle3", 4500), ("eagle3", None), ("mtp", None)], [("float32", 1e-4), ("float64", 1e-9)]),
)
def test_a_head_drafts_what_the_narrow_one_drafts_and_no_padded_token(
    drafts: tuple[DraftKind, int | None],
    numbers: tuple[str, float],
    heads: dict[DraftKind, Path],
    empty_folder: Path,
    widened: Widened,
    wide_folder: Path,
    prompts: list[list[int]],
) -> None:
    (kind, draft_vocab_size), (dtype, tolerance) = drafts, numbers
    write_head(widened, widen_head(widened, heads[kind], draft_vocab_size), torch.float64, CPU, empty_folder)
    text = torch.tensor((prompts[0] + prompts[3])[:40])
    narrow = drafted(Drafter(FOLDER, kind, heads[kind], dtype=dtype), text)
    drafter = Drafter(wide_folder, kind, empty_folder, dtype=dtype)
    wide = drafted(drafter, text)
    torch.testing.assert_close(wide[:, :NARROW_VOCAB], narrow, atol=tolerance, rtol=0)
    assert wide[:, NARROW_VOCAB:].max() < LOUDLY
    assert narrow.std() > 0.2  # random as it is, it says something
    assert drafter.draft.aux_layers == ((1, 6, 10) if kind == "eagle3" else (12,))


def test_an_eagle3_head_has_a_vocabulary_of_its_own_size_with_the_ids_of_its_target(
    widened: Widened, heads: dict[DraftKind, Path]
) -> None:
    head = widen_head(widened, heads["eagle3"], draft_vocab_size=4500)
    made = head.tensors(widened, torch.float32, CPU)
    assert made["lm_head.weight"].shape == (4500, 384)
    assert not made["d2t"].any() and made["d2t"].shape == (4500,)
    assert made["t2d"].nonzero().flatten().tolist() == list(range(4500)) and made["t2d"].shape == (5000,)
    assert (head.raw["draft_vocab_size"], head.raw["target_hidden_size"]) == (4500, 384)
    for size in (4000, 5001):
        with pytest.raises(ValueError, match=f"draft_vocab_size is {size}, and must be from 4096 to 5000"):
            widen_head(widened, heads["eagle3"], draft_vocab_size=size)


def wide_of(shape: str) -> tuple[Widened, ModelConfig]:
    made = widen(FOLDER, SHAPES[shape], SEED)
    return made, made.config


@pytest.mark.parametrize("shape", ["llama-8b", "qwen3-0.6b"])
def test_norms_of_the_large_shapes_are_exact_in_bfloat16(shape: str) -> None:
    made, config = wide_of(shape)
    norm = torch.empty(config.hidden_size, dtype=torch.bfloat16)
    source = torch.linspace(0.5, 2.0, 256).bfloat16()
    made.filler.fill("model.norm.weight", norm, source)
    ratio = (256 / config.hidden_size) ** 0.5
    assert torch.equal(norm[:256].double(), source.double() * ratio)
    assert config.norm_eps == 1e-5 * 256 / config.hidden_size


def test_heads_of_an_8b_model_have_its_sizes(heads: dict[DraftKind, Path]) -> None:
    wide = {kind: widen_head(wide_of("llama-8b")[0], folder) for kind, folder in heads.items()}
    assert wide["eagle3"].shapes["lm_head.weight"] == (32_000, 4096)
    assert wide["mtp"].shapes["model.layers.32.eh_proj.weight"] == (4096, 8192)


def test_heads_are_written_where_the_engine_finds_those_of_a_model(
    heads: dict[DraftKind, Path], empty_folder: Path
) -> None:
    made = widen(FOLDER, MINI, SEED)
    write(made, torch.bfloat16, CPU, empty_folder)
    write_head(made, widen_head(made, heads["eagle3"]), torch.bfloat16, CPU, empty_folder / "eagle3")
    found = find_draft("eagle3", None, empty_folder, read_model_config(empty_folder))
    assert (found.folder, found.aux_layers, found.model.hidden_size) == (empty_folder / "eagle3", (1, 6, 10), 384)
    load_parameters(empty_folder, read_model_config(empty_folder), torch.bfloat16, CPU, "auto")
