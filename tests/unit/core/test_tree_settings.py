"""Shapes of trees: which there are, and which models and settings have none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hiserve.config.options import AUTO_TIERS, make_options
from hiserve.config.settings import AUTO_TREES, TreeShape
from hiserve.core.kv_groups import CarriedBytes
from hiserve.core.resolve import resolve
from hiserve.core.step_memory import ModelFacts
from hiserve.errors import ConfigError
from tests.helpers.model_facts import LAPTOP, NANO, NANO_HEAD

WITH_HEAD = msgspec.structs.replace(NANO, draft=NANO_HEAD)
NONE = dict.fromkeys(("float32", "bfloat16", "float16", "float64"), 8)
LATENT = msgspec.structs.replace(WITH_HEAD, step=msgspec.structs.replace(NANO.step, latent_elements=576))
WITH_STATES = msgspec.structs.replace(WITH_HEAD, carried=CarriedBytes(row=NONE, draft=NONE, snapshot=NONE))
WITH_WINDOWS = msgspec.structs.replace(WITH_HEAD, window=128, window_elements=1024)


def test_a_shape_is_read_and_its_nodes_are_the_only_number_of_drafts() -> None:
    shape = TreeShape.read("3x6:16")
    assert shape == TreeShape(width=3, depth=6, num_nodes=16)
    assert (shape.num_computed, shape.num_candidates) == (15, 48)
    spec = resolve(make_options(spec_tree="3x6:16"), WITH_HEAD, LAPTOP).settings.spec
    assert (spec.spec, spec.tiers, spec.widths, spec.trees) == ("eagle3", (15,), (1, 16), (shape,))
    assert resolve(make_options(spec_tree="1x62:63", max_model_len=8), WITH_HEAD, LAPTOP).settings.spec.tiers == (62,)
    assert resolve(make_options(spec="off"), WITH_HEAD, LAPTOP).settings.spec.trees == ()


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ("3", "Use off, auto, or WIDTHxDEPTH:NODES, such as 3x6:16."),
        ("0x3:4", "Use off, auto, or WIDTHxDEPTH:NODES, such as 3x6:16."),
        ("8x8:64", "a tree has 2 to 63 nodes"),
        ("1x1:1", "a tree has 2 to 63 nodes"),
        ("2x1:4", "its levels have 2 candidates"),
        ("4x5:16", "the head computes 16 candidates, and a tree has more nodes"),
    ],
)
def test_a_shape_that_cannot_be_made_is_refused(given: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact) as refused:
        resolve(make_options(spec_tree=given), WITH_HEAD, LAPTOP)
    assert refused.value.param == "spec_tree"


@pytest.mark.parametrize(
    ("model", "given", "fact"),
    [
        (NANO, {}, "no head came with the model"),
        (WITH_HEAD, {"spec": "off"}, "--spec is off"),
        (WITH_HEAD, {"spec": "ngram"}, "--spec is ngram"),
        (WITH_HEAD, {"spec_steps": 3}, "--spec-steps is 3"),
        (WITH_HEAD, {"tp": 2}, "--tp is 2"),
        (LATENT, {}, "latents or rows of several kinds"),
        (WITH_STATES, {}, "rows carry states along"),
        (WITH_WINDOWS, {}, "Use --window-pages 0"),
    ],
)
def test_what_cannot_have_trees_is_refused(model: ModelFacts, given: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact) as refused:
        resolve(make_options(spec_tree="3x6:16", **given), model, LAPTOP)
    assert refused.value.param == "spec_tree"


def test_layers_with_a_window_in_common_pages_may_have_trees() -> None:
    spec = resolve(make_options(spec_tree="3x6:16", window_pages=0), WITH_WINDOWS, LAPTOP).settings.spec
    assert spec.trees == (TreeShape(3, 6, 16),)


def test_auto_chooses_among_chains_and_trees() -> None:
    spec = resolve(make_options(spec_tree="auto"), WITH_HEAD, LAPTOP).settings.spec
    assert (spec.trees, spec.chains) == (AUTO_TREES, AUTO_TIERS)
    assert spec.tiers == (0, 1, 2, 3, 5, 7, 15) and spec.widths == (1, 2, 3, 4, 6, 8, 16)
    assert spec.max_depth == 6 == max(tree.depth for tree in AUTO_TREES)


@pytest.mark.parametrize(
    ("model", "given", "fact"),
    [
        (NANO, {}, "no head came with the model"),
        (WITH_HEAD, {"spec": "ngram"}, "trees are grown by a head"),
        (WITH_HEAD, {"spec_steps": 3}, "--spec-steps is 3"),
        (WITH_HEAD, {"tp": 2}, "--tp is 2"),
        (WITH_HEAD, {"exact": True}, "--exact is given"),
        (WITH_HEAD, {"max_model_len": 32}, "requests of 32 tokens are too short"),
        (LATENT, {}, "latents or rows of several kinds"),
        (WITH_STATES, {}, "rows carry states along"),
        (WITH_WINDOWS, {}, "layers with a window have pages of their own"),
    ],
)
def test_auto_is_chains_where_there_are_no_trees_and_says_why(
    model: ModelFacts, given: dict[str, Any], fact: str
) -> None:
    resolved = resolve(make_options(spec_tree="auto", **given), model, LAPTOP)
    spec = resolved.settings.spec
    assert (spec.spec_tree, spec.trees, spec.max_depth) == ("off", (), 0)
    assert any(line.startswith("--spec-tree auto -> off: ") and fact in line for line in resolved.decisions)
    assert spec.tiers == resolve(make_options(**given), model, LAPTOP).settings.spec.tiers
