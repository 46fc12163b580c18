"""What is read of a draft's folder without torch, and which drafts are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hiserve.config.options import make_options
from hiserve.errors import ModelError
from hiserve.launch import prepare
from hiserve.models.draft_config import DraftConfig, DraftKind, find_draft, page_groups, read_draft
from hiserve.models.model_config import read_model_config
from hiserve.models.weights import load_head_parameters
from tests.helpers.draft_heads import SHAPE, edit, make_head, make_target, save_head, save_target
from tools.nano.head_files import published
from tools.nano.heads import Eagle3Head, MTPHead

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, target = tmp_path_factory.mktemp("saved"), make_target()
    save_target(target, folder / "target")
    save_head(make_head(Eagle3Head, target), folder / "eagle3")
    save_head(make_head(MTPHead, target), folder / "mtp")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model, and heads beside it."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def found(folder: Path, kind: DraftKind, name: str | None = None) -> DraftConfig:
    target = folder / "target"
    return find_draft(kind, str(folder / (name or kind)), target, read_model_config(target))


def refusal(folder: Path, kind: DraftKind, name: str | None = None) -> str:
    with pytest.raises(ModelError) as refused:
        found(folder, kind, name)
    assert refused.value.param == "spec"
    return refused.value.message


def loaded(folder: Path, kind: DraftKind) -> tuple[dict[str, Tensor], Tensor | None]:
    return load_head_parameters(found(folder, kind), torch.float32, CPU, "auto")


def load_refusal(folder: Path, kind: DraftKind) -> str:
    with pytest.raises(ModelError) as refused:
        loaded(folder, kind)
    assert refused.value.param == "spec"
    return refused.value.message


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_memory_a_head_takes_is_known_before_it_is_read(folder: Path, kind: Any) -> None:
    draft = found(folder, kind)
    assert draft.num_params == sum(parameter.numel() for parameter in loaded(folder, kind)[0].values())
    (group,) = draft.kv_groups("float32")
    assert (group.name, group.num_layers, group.num_kv_heads, group.head_dim) == ("draft", 1, 2, 8)
    assert draft.model.facts().slot_elements == 2 * 2 * 8
    assert (draft.feature_size, draft.shift) == (SHAPE.hidden_size, 1)


def test_a_head_of_its_own_positions(folder: Path) -> None:
    """A file without any has those of Llama's first models, whatever the model has."""
    path = folder / "eagle3" / "config.json"
    raw = json.loads(path.read_text())
    assert found(folder, "eagle3").model.rope.theta == SHAPE.rope_theta
    del raw["rope_theta"]
    path.write_text(json.dumps(raw))
    assert found(folder, "eagle3").model.rope.theta == 10_000


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_in_the_models_folder_came_with_it(folder: Path, kind: Any) -> None:
    target = folder / "target"
    with pytest.raises(ModelError, match=f"no {kind} came with the model") as refused:
        find_draft(kind, None, target, read_model_config(target))
    assert refused.value.param == "spec"
    shutil.copytree(folder / kind, target / kind)
    draft = find_draft(kind, None, target, read_model_config(target))
    assert draft.folder == target / kind


def test_a_head_among_the_models_tensors_needs_no_folder(folder: Path) -> None:
    target = folder / "target"
    head = published(make_head(MTPHead, make_target()), SHAPE, torch.float32)
    edit(target, add=head, num_nextn_predict_layers=1)
    draft = find_draft("mtp", None, target, read_model_config(target))
    assert draft.folder == target
    parameters, _ = load_head_parameters(draft, torch.float32, CPU, "auto")
    assert draft.num_params == sum(map(torch.Tensor.numel, parameters.values()))
    edit(target, drop=["model.layers.8.enorm.weight"])
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.8\.enorm\.weight"):
        load_head_parameters(draft, torch.float32, CPU, "auto")
    edit(target, add={"model.layers.8.more.weight": torch.zeros(3), "model.layers.8.enorm.weight": torch.ones(32)})
    with pytest.raises(ModelError, match=r"has tensor model\.layers\.8\.more\.weight, which a head"):
        load_head_parameters(draft, torch.float32, CPU, "auto")


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("eagle3", {"target_hidden_size": 48}, "made for a hidden_size of 48, the model's is 32"),
        ("eagle3", {"hidden_size": 48, "head_dim": 8}, "its hidden_size is 48, that of the model's embedding 32"),
        ("eagle3", {"vocab_size": 98}, "made for 98 tokens, the model has 97"),
        ("eagle3", {"draft_vocab_size": 98}, "it drafts 98 tokens, more than the model's 97"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}}, "layers 1, 3, 8, .* has 8"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}}, "one of them twice"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "it sees no layer"),
        ("mtp", {"hidden_size": 48}, "made for a hidden_size of 48"),
        ("mtp", {"vocab_size": 96}, "made for 96 tokens"),
        ("mtp", {"num_hidden_layers": 6}, "made for a model of 6 layers, this one has 8"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(folder: Path, kind: Any, fields: dict[str, Any], said: str) -> None:
    edit(folder / kind, **fields)
    message = refusal(folder, kind)
    assert re.search(said, message), message
    assert "Name one that was made for this model" in message


def test_default_layers_of_a_shallow_model_are_refused(tmp_path: Path) -> None:
    """Those that its authors chose collide below eight layers."""
    shape = dataclasses.replace(SHAPE, num_layers=6)
    target = make_target(shape)
    save_target(target, tmp_path / "target")
    save_head(make_head(Eagle3Head, target), tmp_path / "eagle3", shape, eagle_config=None)
    assert "sees layers 1, 2, 2, one of them twice; config.json must say which" in refusal(tmp_path, "eagle3")


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("eagle3", {"num_hidden_layers": 2}, "it has 2 layers. Name another one, or leave --spec out"),
        ("eagle3", {"bias": True}, "a bias of fc"),
        ("eagle3", {"fc_norm": True}, "fc_norm"),
        ("eagle3", {"use_aux_norm": True}, "use_aux_norm"),
        ("eagle3", {"norm_output": True}, "norm_output"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ("eagle3", {"architectures": ["Eagle3Speculator"]}, "makes no sense"),
        ("eagle3", {"architectures": ["LlamaForCausalLMEagle"]}, "LlamaForCausalLMEagle of .* is no eagle3 head"),
        ("eagle3", {"architectures": None}, r"architecture \(none given\)"),
        ("eagle3", {"eagle_config": 3}, "makes no sense"),
        ("mtp", {"architectures": ["Eagle3Speculator"]}, "is no mtp head .*LlamaForCausalLMNextN"),
        ("mtp", {"num_nextn_predict_layers": 2}, "2 heads"),
        ("mtp", {"num_nextn_predict_layers": None}, "0 heads"),
    ],
)
def test_what_no_head_is_read_from_is_refused(folder: Path, kind: Any, fields: dict[str, Any], said: str) -> None:
    edit(folder / kind, **fields)
    message = refusal(folder, kind)
    assert re.search(said, message), message


def speculators(folder: Path, **fields: Any) -> None:
    path = folder / "eagle3" / "config.json"
    raw = json.loads(path.read_text())
    nested = {"architectures": ["Eagle3DraftModel"], "transformer_layer_config": raw, "draft_vocab_size": 97} | fields
    path.write_text(json.dumps(nested))


def test_speculators_must_say_what_engines_assume_differently(folder: Path) -> None:
    speculators(folder)
    assert "no norm_before_residual" in refusal(folder, "eagle3")


def test_a_speculators_layer_of_another_kind_is_refused(folder: Path) -> None:
    layer = json.loads((folder / "eagle3" / "config.json").read_text()) | {"model_type": "qwen3"}
    speculators(folder, transformer_layer_config=layer, norm_before_residual=False)
    assert "transformer_layer_config of another kind than llama" in refusal(folder, "eagle3")


def test_experts_behind_the_last_layer_are_refused(folder: Path) -> None:
    experts = {"architectures": ["Qwen3MoeForCausalLMNextN"], "num_experts": 4, "num_experts_per_tok": 2}
    edit(folder / "mtp", **experts)
    assert "it has experts" in refusal(folder, "mtp")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eagle3", "fc.weight"),
        ("eagle3", "midlayer.hidden_norm.weight"),
        ("eagle3", "midlayer.self_attn.v_proj.weight"),
        ("eagle3", "lm_head.weight"),
        ("mtp", "model.layers.8.eh_proj.weight"),
        ("mtp", "model.layers.8.shared_head.norm.weight"),
        ("mtp", "model.layers.8.mlp.up_proj.weight"),
    ],
)
def test_missing_and_unexpected_tensors_are_named(folder: Path, kind: Any, name: str) -> None:
    tensor = load_file(folder / kind / "model.safetensors")[name]
    edit(folder / kind, drop=[name])
    assert f"lacks tensor {name}. Is the download complete?" in load_refusal(folder, kind)
    edit(folder / kind, add={name: tensor, name + "_extra": tensor.clone()})
    assert f"has tensor {name}_extra, which a head" in load_refusal(folder, kind)
    edit(folder / kind, drop=[name + "_extra"], add={name: torch.zeros((3, *tensor.shape))})
    message = load_refusal(folder, kind)
    assert f"tensor {name} has shape" in message


def test_a_missing_file_is_named(folder: Path) -> None:
    draft = found(folder, "eagle3")
    (folder / "eagle3" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has neither") as refused:
        load_head_parameters(draft, torch.float32, CPU, "auto")
    assert refused.value.param == "spec"


def test_a_full_vocabulary_needs_no_map(folder: Path) -> None:
    edit(folder / "eagle3", drop=["d2t", "t2d"])
    assert loaded(folder, "eagle3")[1] is None
    edit(folder / "eagle3", add={"d2t": torch.zeros(97, dtype=torch.int64)})
    assert loaded(folder, "eagle3")[1] is None


def test_a_permuted_vocabulary_is_mapped(folder: Path) -> None:
    swapped = torch.zeros(97, dtype=torch.int64)
    swapped[0], swapped[1] = 1, -1
    edit(folder / "eagle3", add={"d2t": swapped})
    tokens = loaded(folder, "eagle3")[1]
    assert tokens is not None
    assert tokens.tolist() == [1, 0, *range(2, 97)]


def reduce(folder: Path, offsets: Tensor | None) -> None:
    head = load_file(folder / "eagle3" / "model.safetensors")["lm_head.weight"][:4]
    add = {"lm_head.weight": head} | ({} if offsets is None else {"d2t": offsets})
    edit(folder / "eagle3", drop=["d2t"], add=add, draft_vocab_size=4)


def test_a_smaller_vocabulary_needs_a_map(folder: Path) -> None:
    reduce(folder, None)
    assert "lacks tensor d2t" in load_refusal(folder, "eagle3")


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        (torch.tensor([0, 0, 0, 94]), "names tokens 0 to 97"),
        (torch.tensor([-1, 0, 0, 0]), "names tokens -1 to 3"),
        (torch.tensor([1, 0, 0, 0]), "different ones"),
        (torch.tensor([0, 0, 0]), "4 whole numbers are wanted"),
        (torch.tensor([0.0, 0, 0, 0]), "4 whole numbers are wanted"),
    ],
)
def test_a_map_to_no_tokens_is_refused(folder: Path, offsets: Tensor, said: str) -> None:
    reduce(folder, offsets)
    assert said in load_refusal(folder, "eagle3")


def test_a_small_model_of_another_vocabulary_is_refused(folder: Path) -> None:
    small = shutil.copytree(folder / "target", folder / "small")
    assert found(folder, "draft_model", "small").num_params == read_model_config(small).num_params
    edit(small, vocab_size=96)
    assert "it has 96 tokens, the model 97" in refusal(folder, "draft_model", "small")


def test_a_small_model_with_other_numbers_of_tokens_is_refused(folder: Path) -> None:
    small = shutil.copytree(folder / "target", folder / "small")
    ours = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<s>", "id": 2}]}
    (folder / "target" / "tokenizer.json").write_text(json.dumps(ours))
    found(folder, "draft_model", "small")  # says nothing of its own
    (small / "tokenizer.json").write_text(json.dumps(ours | {"normalizer": None}))
    found(folder, "draft_model", "small")
    for other in (ours | {"model": {"vocab": {"a": 1, "b": 0}}}, ours | {"added_tokens": []}):
        (small / "tokenizer.json").write_text(json.dumps(other))
        assert "gives tokens other numbers" in refusal(folder, "draft_model", "small")


def test_what_is_nowhere_is_refused(folder: Path) -> None:
    for kind in ("eagle3", "draft_model"):
        assert "no model folder" in refusal(folder, kind, "nothing/at/all")


def test_elements_of_a_head_are_counted_with_its_own_embedding(folder: Path) -> None:
    before = found(folder, "eagle3").num_params
    edit(folder / "eagle3", add={"embed_tokens.weight": torch.zeros(97, 32)})
    assert found(folder, "eagle3").num_params == before + math.prod((97, 32))


@pytest.mark.parametrize("given", [{"spec": "off"}, {"spec": "eagle3"}, {"spec": "off", "kv_canary": True}])
@pytest.mark.parametrize("page_size", [16, 64])
def test_the_memory_plan_counts_every_group_of_a_page(given: dict[str, Any], page_size: int) -> None:
    launch = prepare(make_options(kv_pages=64, page_size=page_size, **given))
    settings, parts = launch.resolved.settings, launch.resolved.memory.parts
    groups = page_groups(settings, launch.model, read_draft(settings, launch.folder, launch.model))
    held = sum(num_bytes for item, num_bytes in parts.items() if item.startswith("KV pool"))
    assert held == 64 * page_size * sum(group.slot_bytes for group in groups)
