"""A widened model says what the narrow one says, and computes all that it has more."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.drive import Drive
from benchmarks.widen.__main__ import main
from benchmarks.widen.heads import WideHead, widen_head, write_head
from benchmarks.widen.places import Places
from benchmarks.widen.plan import head_bytes, largest_bytes, target_bytes
from benchmarks.widen.target import Widened, parameters, widen, write, write_shards
from hiserve import LLM, SamplingParams
from hiserve.models.config import NANO, ModelConfig, find_model, read_model_config
from hiserve.models.hub import INDEX
from hiserve.models.shapes import SHAPES
from hiserve.models.weights import load_parameters
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tools.nano.head_files import export_head, load_head, load_target, restore
from tools.nano.heads import HEADS, Head, Seen, unroll
from tools.nano.model import Nano, NanoConfig

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
ENGINE |= {"max_running_requests": 4, "max_model_len": 256, "max_batched_tokens": 64}
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
        seen = [drive.add(torch.tensor(prompt, dtype=torch.int32).numpy(), 64) for prompt in prompts]
        drive.finish(*seen)
        replies.append([each.tokens for each in seen])
        drive.close()
    assert replies[0] == replies[1]
    assert [len(reply) for reply in replies[1]] == [64] * len(prompts)


def test_a_hot_sampler_draws_what_it_draws_of_the_narrow_model_and_no_padded_token(
    wide_folder: Path, prompts: list[list[int]]
) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=1.0, top_k=-1, seed=11, max_tokens=48, ignore_eos=True)
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


def test_heads_and_neurons_that_nobody_reads_cost_as_much_as_others(widened: Widened) -> None:
    made = parameters(widened, torch.float32, CPU)
    axes = widened.places.axes
    for name, axis in (("qkv", axes["queries"]), ("gate_up", axes["inner"])):
        free = torch.ones(axis.size, dtype=torch.bool).index_fill_(0, axis.taken, False)
        assert made[f"layers.0.{name}"][: axis.size][free].ne(0).all()
        assert free.sum() > 0


def test_parameters_in_memory_are_those_of_the_files(widened: Widened, wide_folder: Path) -> None:
    made = parameters(widened, torch.float64, CPU)
    read = load_parameters(wide_folder, read_model_config(wide_folder), torch.float64, CPU, "auto")
    assert made.keys() == read.keys()
    assert all(torch.equal(made[name], read[name]) for name in made)


def test_another_seed_draws_other_weights(widened: Widened) -> None:
    first, again, other = (
        parameters(each, torch.bfloat16, CPU)["layers.2.qkv"] for each in (widened, widened, widen(FOLDER, MINI, 4))
    )
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
        parameters(widened, torch.float16, CPU)


# Draft heads: random ones, in the form they are trained in.


@dataclass(frozen=True)
class Drafter:
    """A target in training form, a head of it, and what the head's output layer and inputs are."""

    target: Nano
    head: Head
    output: Tensor
    aux_layers: list[int]


@pytest.fixture(scope="module")
def target() -> Nano:
    return load_target(FOLDER, CPU)


@pytest.fixture(scope="module")
def wide_target(widened: Widened, wide_folder: Path) -> tuple[Nano, Tensor]:
    """The wide model in training form, and its output layer."""
    config = widened.config
    shape = NanoConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.intermediate_size,
        rope_theta=config.rope.theta,
        max_positions=512,
        norm_eps=config.norm_eps,
    )
    state: dict[str, Tensor] = {}
    for file in wide_folder.glob("*.safetensors"):
        state |= {name.removeprefix("model."): tensor.float() for name, tensor in load_file(file).items()}
    output = state.pop("lm_head.weight")
    model = Nano(shape)
    model.load_state_dict(state)
    return model.requires_grad_(False).eval(), output


def random_head(kind: str, target: Nano, folder: Path) -> Path:
    """Writes a random head of nano."""
    torch.manual_seed(7)
    export_head(HEADS[kind](target), target.config, folder)
    return folder


def observe(drafter: Drafter, ids: Tensor) -> Seen:
    """What the head sees of the target."""
    target, x, aux = drafter.target, drafter.target.embed_tokens(ids), []
    for number, layer in enumerate(target.layers):
        x = layer(x, target.cos[: ids.shape[1]], target.sin[: ids.shape[1]])
        if number in drafter.aux_layers:
            aux.append(x)
    return Seen(aux=torch.cat(aux, dim=-1), last=target.norm(x))


def drafted(drafter: Drafter, ids: Tensor) -> Tensor:
    """Logits ``[3, 1, T - 3, vocab]`` of three drafts from every row."""
    seen = observe(drafter, ids)
    return torch.stack(
        [
            F.linear(normed, drafter.output)
            for normed in unroll(drafter.head, drafter.target.embed_tokens.weight, ids, seen, 3)
        ]
    )


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_drafts_what_the_narrow_one_drafts_and_no_padded_token(
    kind: str,
    tmp_path: Path,
    widened: Widened,
    target: Nano,
    wide_target: tuple[Nano, Tensor],
    prompts: list[list[int]],
) -> None:
    folder = random_head(kind, target, tmp_path / "narrow")
    head = load_head(folder, target)
    narrow = Drafter(target, head, head.output_weight(target.embed_tokens.weight), [1, 3, 5])
    write_head(widened, widen_head(widened, folder), torch.float32, CPU, tmp_path / "wide")
    raw = json.loads((tmp_path / "wide" / "config.json").read_text())
    wide_head = HEADS[kind](wide_target[0]).eval()
    restore(wide_head, load_file(tmp_path / "wide" / "model.safetensors"), wide_target[0].config)
    output = wide_head.output_weight(wide_target[1])
    aux_layers = raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [])
    wide = Drafter(wide_target[0], wide_head, output, aux_layers or [0])
    ids = torch.tensor([prompts[0] + prompts[3]])
    expected, found = drafted(narrow, ids), drafted(wide, ids)
    torch.testing.assert_close(found[..., :NARROW_VOCAB], expected, atol=1e-4, rtol=0)
    assert found[..., NARROW_VOCAB:].max() < LOUDLY
    assert expected.std() > 0.05  # random as it is, it says something
    assert (raw["num_hidden_layers"], aux_layers) == ((1, [1, 4, 7]) if kind == "eagle3" else (12, []))


def test_an_eagle3_head_has_a_vocabulary_of_its_own_size_with_the_ids_of_its_target(
    tmp_path: Path, widened: Widened, target: Nano
) -> None:
    folder = random_head("eagle3", target, tmp_path)
    head = widen_head(widened, folder, draft_vocab_size=4500)
    made = head.tensors(widened, torch.float32, CPU)
    assert made["lm_head.weight"].shape == (4500, 384)
    assert not made["d2t"].any() and made["d2t"].shape == (4500,)
    assert made["t2d"].nonzero().flatten().tolist() == list(range(4500)) and made["t2d"].shape == (5000,)
    assert (head.raw["draft_vocab_size"], head.raw["target_hidden_size"]) == (4500, 384)
    for size in (4000, 5001):
        with pytest.raises(ValueError, match=f"draft_vocab_size is {size}, and must be from 4096 to 5000"):
            widen_head(widened, folder, draft_vocab_size=size)


def wide_of(shape: str) -> tuple[Widened, ModelConfig]:
    made = widen(FOLDER, SHAPES[shape], SEED)
    return made, made.config


@pytest.mark.parametrize(("shape", "gib"), [("llama-8b", 14.96), ("qwen3-0.6b", 1.11)])
def test_the_plan_of_a_shape_counts_its_parameters_once(shape: str, gib: float) -> None:
    made, config = wide_of(shape)
    parts = target_bytes(made, 2)
    assert sum(parts.values()) == 2 * config.num_params
    assert sum(parts.values()) / 2**30 == pytest.approx(gib, abs=0.01)
    assert parts["extra layers"] / parts["layers that compute"] == config.num_layers / 8 - 1
    assert largest_bytes(made, 2) == 2 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("shape", ["llama-8b", "qwen3-0.6b"])
def test_norms_of_the_large_shapes_are_exact_in_bfloat16(shape: str) -> None:
    made, config = wide_of(shape)
    norm = torch.empty(config.hidden_size, dtype=torch.bfloat16)
    source = torch.linspace(0.5, 2.0, 256).bfloat16()
    made.filler.fill("model.norm.weight", norm, source)
    ratio = (256 / config.hidden_size) ** 0.5
    assert torch.equal(norm[:256].double(), source.double() * ratio)
    assert config.norm_eps == 1e-5 * 256 / config.hidden_size


def test_the_command_plans_an_8b_model_and_its_heads_and_writes_nothing(
    tmp_path: Path, target: Nano, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {kind: random_head(kind, target, tmp_path / kind) for kind in HEADS}
    flags = [word for kind, folder in heads.items() for word in ("--head", f"{kind}={folder}")]
    monkeypatch.setattr(sys, "argv", ["widen", "llama-8b", str(tmp_path / "out"), "--plan", *flags])
    main()
    told = capsys.readouterr().out
    assert "parameters, in one copy        14.958 GiB" in told
    wide: dict[str, WideHead] = {kind: widen_head(wide_of("llama-8b")[0], folder) for kind, folder in heads.items()}
    for kind, head in wide.items():
        assert f"head {kind:23} {head_bytes(head, 2) / 2**30:8.3f} GiB" in told
    assert wide["eagle3"].shapes["lm_head.weight"] == (32_000, 4096)
    assert wide["mtp"].shapes["model.layers.32.eh_proj.weight"] == (4096, 8192)
    assert not (tmp_path / "out").exists()
