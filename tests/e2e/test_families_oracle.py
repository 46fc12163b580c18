"""Every family against transformers: logits in float32, tokens in float64, through the whole engine.

Each family, size, RoPE scaling and spelling occurs twice here, each pair of them behind ``wide``; the full product behind ``long``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.layers import MoE
from hiserve.models.model_config import read_model_config
from tests.helpers.models import FAMILIES, Engine, load_transformers, save_family, spell_as_before
from tests.helpers.oracle import NUM_PAGES, Subject, check_logits, check_tokens, continuation, prompts_of
from tests.helpers.widening import usual

ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    # Engines here serve up to 256 tokens of the model's 512: its list for short contexts.
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 256},
}
AXES: dict[str, tuple[Any, ...]] = {
    "family": (*FAMILIES, "llama with biases", "qwen3_moe as it comes"),
    "head_dim": (24, 80, 128),
    "kv_heads": (1, 3, 8),
    "tied": (False, True),
    "rope": tuple(ROPE),
    "spelling": ("rope_parameters", "rope_type", "type"),
    "attention": ("cpu", "reference"),
    "chunk": (7, 64),
    "depth": (0, 1),
}
NUM_MODEL_AXES = 6
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_moe as it comes": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
}
Case = tuple[Any, ...]


def pairwise() -> list[Case]:
    """Returns few cases in which every pair of values of two axes meets; greedy, and the same each time."""
    names = list(AXES)
    missing = {
        (one, value, other, its)
        for one, other in itertools.combinations(range(len(names)), 2)
        for value in AXES[names[one]]
        for its in AXES[names[other]]
    }
    cases = []
    while missing:
        one, value, other, its = min(missing, key=repr)
        case: dict[int, Any] = {one: value, other: its}
        for axis in range(len(names)):
            if axis not in case:
                case[axis] = max(AXES[names[axis]], key=lambda each: len(met({**case, axis: each}) & missing))
        cases.append(tuple(case[axis] for axis in range(len(names))))
        missing -= met(case)
    return cases


def met(case: dict[int, Any]) -> set[tuple[int, Any, int, Any]]:
    """Returns the pairs of values that a case brings together."""
    return {(one, case[one], other, case[other]) for one, other in itertools.combinations(sorted(case), 2)}


def full_product() -> list[Case]:
    """Returns every model there can be, the ways to run it taking turns."""
    models, ways = (list(AXES.values())[part] for part in (slice(NUM_MODEL_AXES), slice(NUM_MODEL_AXES, None)))
    return [(*model, *way) for model, way in zip(itertools.product(*models), itertools.cycle(itertools.product(*ways)))]


PAIRS = pairwise()
OTHERS = [pytest.param(*case, marks=pytest.mark.long) for case in full_product() if case not in PAIRS]


def rope_parameters(kind: str, head_dim: int) -> dict[str, Any]:
    """Returns the scaling as transformers 5 spells it."""
    given = {"rope_type": kind, "rope_theta": 2e4} | ROPE[kind]
    if kind == "longrope":
        given |= {
            "short_factor": [1.0 + 0.1 * i for i in range(head_dim // 2)],
            "long_factor": [4.0 + 0.5 * i for i in range(head_dim // 2)],
        }
    return given


@pytest.mark.parametrize(
    tuple(AXES), [*(pytest.param(*case.values[0], marks=case.marks) for case in usual(PAIRS)), *OTHERS]
)
def test_a_model_gives_the_logits_and_tokens_of_transformers(
    tmp_path: Path,
    family: str,
    head_dim: int,
    kv_heads: int,
    tied: bool,
    rope: str,
    spelling: str,
    attention: str,
    chunk: int,
    depth: int,
) -> None:
    torch.set_num_threads(1)
    name, overrides = VARIANTS.get(family, (family, {}))
    save_family(
        name,
        tmp_path,
        hidden_size=48,
        num_hidden_layers=2,
        head_dim=head_dim,
        num_attention_heads={1: 3, 3: 6, 8: 8}[kv_heads],
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_parameters=rope_parameters(rope, head_dim),
        **overrides,
    )
    config = read_model_config(tmp_path)
    if spelling != "rope_parameters":
        spell_as_before(tmp_path, spelling)
        assert read_model_config(tmp_path) == config
    oracle = load_transformers(tmp_path, torch.float32)
    assert config.num_params == sum(parameter.numel() for parameter in oracle.parameters())
    prompts = dict(enumerate(prompts_of(name, tmp_path), start=1))
    prompts[5] = [*prompts[3][::-1], *prompts[2]]
    check_logits(oracle, Engine(tmp_path, attention=attention, num_pages=NUM_PAGES), prompts)
    oracle = oracle.double()
    greedy = {row: continuation(oracle, prompt) for row, prompt in prompts.items()}
    check_tokens(Subject(tmp_path, prompts, greedy, sampled={}), chunk, depth).close()


WINDOW = 16
SLIDING: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "qwen2, all but one": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3, one": (
        "qwen3",
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe": ("qwen3_moe", {"use_sliding_window": True}),
}


@pytest.mark.parametrize(
    ("case", "chunk", "depth"),
    [*zip(SLIDING, itertools.cycle((WINDOW + 1, 64)), itertools.cycle((0, 1))), ("mistral", 64, 1)],
)
def test_a_sliding_window_moves_as_in_transformers(tmp_path: Path, case: str, chunk: int, depth: int) -> None:
    """Prompts end around the window and around its double; others reach it, and its double, while they are decoded."""
    torch.set_num_threads(1)
    name, overrides = SLIDING[case]
    save_family(name, tmp_path, sliding_window=WINDOW, **overrides)
    config = read_model_config(tmp_path)
    assert WINDOW in config.windows
    generator = torch.Generator().manual_seed(6)
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 3, 70)
    prompts = {
        row: torch.randint(0, 320, (length,), generator=generator).tolist() for row, length in enumerate(lengths, 1)
    }
    oracle = load_transformers(tmp_path, torch.float32)
    for attention in ("cpu", "reference"):
        check_logits(oracle, Engine(tmp_path, attention=attention, num_pages=NUM_PAGES), prompts)
    oracle = oracle.double()
    greedy = {row: continuation(oracle, prompt) for row, prompt in prompts.items()}
    window_pages = 200 if None in config.windows else 0  # else windows are the only history
    subject = Subject(tmp_path, prompts, greedy, sampled={})
    check_tokens(subject, chunk, depth, window_pages=window_pages).close()


def test_the_usual_cases_bring_every_pair_together() -> None:
    for one, other in itertools.combinations(range(len(AXES)), 2):
        values = list(AXES.values())
        assert {(case[one], case[other]) for case in PAIRS} == set(itertools.product(values[one], values[other]))


def test_experts_stand_in_the_layers_that_the_configuration_names(tmp_path: Path) -> None:
    """The cases above would pass with an MLP in every layer if transformers had one there too."""
    folder = save_family("qwen3_moe", tmp_path, num_hidden_layers=4, mlp_only_layers=[0], decoder_sparse_step=2)
    layers = Engine(folder).model._layers
    assert [isinstance(layer.mlp, MoE) for layer in layers] == [False, True, False, True]


def test_longrope_takes_its_long_list_for_a_long_context(tmp_path: Path) -> None:
    """transformers takes it for a prompt beyond the original context; here all its positions come at once."""
    scaling = rope_parameters("longrope", 16) | {"original_max_position_embeddings": 32}
    folder = save_family("llama", tmp_path, rope_parameters=scaling)
    prompts = {1: list(range(5, 75)), 2: list(range(100, 133))}
    check_logits(load_transformers(folder, torch.float32), Engine(folder, num_pages=NUM_PAGES), prompts)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "save", [{"save_original_format": False}, {"max_shard_size": "40KB"}], ids=["fused", "sharded"]
)
def test_experts_are_read_in_every_spelling(tmp_path: Path, family: str, save: dict[str, Any]) -> None:
    folder = save_family(family, tmp_path, save=save)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert (len(files) > 2) == ("max_shard_size" in save)
    prompts = {1: list(range(5, 25))}
    check_logits(load_transformers(folder, torch.float32), Engine(folder, num_pages=NUM_PAGES), prompts)
