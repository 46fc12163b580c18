"""What cannot draft is refused when the engine starts, with what would work; and nothing of it stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiserve import LLM, SamplingParams
from hiserve.errors import ConfigError, HiserveError, ModelError
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cache_paths import SETTINGS, pool
from tests.helpers.drafted import save_heads

WEIGHTS = "model.safetensors"
OTHER = "Name one that was made for this model, or leave --spec out."
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return save_heads(tmp_path_factory.mktemp("heads"), seed=3)


def start(**settings: Any) -> LLM:
    return LLM(**SETTINGS | pool(16) | {"host_cache_gib": 0} | settings)


def config(**fields: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def layers(*seen: int) -> Damage:
    return config(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": seen})


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Replaces a tensor, or leaves it out."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        changed = change(tensors.pop(name, torch.zeros(3)))
        save_file(tensors if changed is None else tensors | {name: changed}, folder / WEIGHTS)

    return damage


def written(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


MADE_FOR_OTHERS: list[tuple[str, Damage, str]] = [
    ("eagle3", config(hidden_size=128), "its hidden_size is 128, that of the model's embedding 256"),
    ("eagle3", config(target_hidden_size=512), "made for a hidden_size of 512, the model's is 256"),
    ("eagle3", config(vocab_size=4000), "made for 4000 tokens, the model has 4096"),
    ("eagle3", config(draft_vocab_size=5000), "drafts 5000 tokens, more than the model's 4096"),
    ("eagle3", layers(1, 3, 8), "sees layers 1, 3, 8, counted from 0, but the model has 8"),
    ("eagle3", layers(1, 3, 3), "one of them twice"),
    ("mtp", config(hidden_size=128), "made for a hidden_size of 128"),
    ("mtp", config(vocab_size=4000), "made for 4000 tokens"),
    ("mtp", config(num_hidden_layers=6), "made for a model of 6 layers, this one has 8"),
]
BROKEN: list[tuple[str, Damage, str]] = [
    ("eagle3", config(num_hidden_layers=2), "it has 2 layers. Name another one, or leave --spec out."),
    ("mtp", config(num_nextn_predict_layers=2), "it has 2 heads, one for each draft. Name another one"),
    ("eagle3", config(architectures=["BertModel"]), "BertModel of .* Supported: .*LlamaForCausalLMEagle3"),
    (
        "eagle3",
        written("config.json", lambda text: text[:9]),
        "config.json in .* is not valid JSON: .* Fetch it again.",
    ),
    ("eagle3", written(WEIGHTS, lambda data: data[: len(data) // 2]), "is damaged: .* Fetch it again."),
    ("mtp", written(WEIGHTS, lambda data: b"\xff" * 64 + data[64:]), "is damaged: .* Fetch it again."),
    ("mtp", written(WEIGHTS, lambda data: b""), "is damaged: .* Fetch it again."),
    ("eagle3", tensor("fc.weight", lambda old: None), "lacks tensor fc.weight. Is the download complete?"),
    ("mtp", tensor("model.layers.8.enorm.weight", lambda old: None), "lacks tensor model.layers.8.enorm.weight. Is"),
    ("eagle3", tensor("surprise.weight", lambda old: old), "has tensor surprise.weight, .* Does config.json describe"),
    ("mtp", tensor("model.layers.8.surprise", lambda old: old), "has tensor model.layers.8.surprise, "),
    (
        "eagle3",
        tensor("norm.weight", lambda old: old[1:]),
        r"has shape \[255\]; config.json asks for \[256\]. Take both",
    ),
    (
        "mtp",
        tensor("model.layers.8.hnorm.weight", lambda old: old.int()),
        "holds I32, and floating-point numbers, or F8_E4M3 .* are supported there. Give another checkpoint than",
    ),
]


@pytest.mark.parametrize(
    ("kind", "damage", "said"),
    [*((kind, damage, f"{said}.*{OTHER}") for kind, damage, said in MADE_FOR_OTHERS), *BROKEN],
)
def test_a_head_that_does_not_fit_or_is_broken_is_refused(
    heads: dict[str, Path], tmp_path: Path, kind: str, damage: Damage, said: str
) -> None:
    folder = Path(shutil.copytree(heads[kind], tmp_path / "head"))
    damage(folder)
    with pytest.raises(ModelError, match=said) as refused:
        start(spec=f"{kind}:{folder}")
    assert refused.value.param == "spec"
    assert str(folder) in refused.value.message


@pytest.mark.parametrize(("vocab_size", "said"), [(4096, "gives tokens other numbers"), (4000, "it has 4000 tokens")])
def test_a_small_model_that_speaks_otherwise_is_refused(tmp_path: Path, vocab_size: int, said: str) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        shutil.copy(find_model(NANO) / name, folder)
    config(vocab_size=vocab_size)(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    numbers: dict[str, int] = tokenizer["model"]["vocab"]
    first, second = list(numbers)[300:302]
    numbers[first], numbers[second] = numbers[second], numbers[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=f"{said}.*{OTHER}") as refused:
        start(spec=f"draft:{folder}")
    assert refused.value.param == "spec"


@pytest.mark.parametrize(
    ("settings", "param", "said"),
    [
        (
            {"spec": "medusa"},
            "spec",
            "'medusa'. Use off, auto, ngram, eagle3, mtp, eagle3:PATH, mtp:PATH or draft:PATH",
        ),
        ({"spec": "eagle3:"}, "spec", "Use off, auto"),
        ({"spec": "draft"}, "spec", "Use off, auto"),
        ({"spec": "mtp:/nowhere"}, "spec", "no model folder at '/nowhere'. Give a folder"),
        ({"spec": "ngram", "spec_steps": 16}, "spec_steps", "--spec-steps is 16; the most is 15"),
        ({"spec": "ngram", "spec_steps": -1}, "spec_steps", "--spec-steps is -1; the least is 0"),
        ({"spec": "ngram", "spec_steps": 1.5}, "spec_steps", "1.5; give a whole number or auto"),
        ({"spec": "ngram", "spec_steps": "many"}, "spec_steps", "'many'; give a whole number or auto"),
        ({"spec": "ngram", "spec_steps": True}, "spec_steps", "True; give a whole number or auto"),
        ({"spec": "ngram", "spec_steps": "auto", "max_model_len": 8}, "spec_steps", "or set --spec-steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(HiserveError, match=said) as refused:
        start(**settings)
    assert isinstance(refused.value, ConfigError | ModelError)
    assert refused.value.param == param


def test_after_a_refusal_the_next_start_serves(heads: dict[str, Path], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(heads["mtp"], tmp_path / "head"))
    tensor("model.layers.8.enorm.weight", lambda old: None)(broken)
    for _ in range(2):
        with pytest.raises(ModelError):
            start(spec=f"mtp:{broken}")
        with start(spec=f"mtp:{heads['mtp']}", spec_steps=2) as llm:
            (result,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
            assert len(result.outputs[0].token_ids) == 4
