"""Which backend is opened for what, and what is said when it cannot be."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hiserve.attention.backends import _BACKENDS, fitting_backends, open_attention, open_draft_attention
from hiserve.attention.base import AttentionShape, IndexShape, LatentShape
from hiserve.attention.cpu import CpuAttention
from hiserve.attention.indexed import IndexedAttention
from hiserve.attention.latent import LatentAttention
from hiserve.attention.paired import GraphedAttention, PairedAttention
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.errors import ConfigError
from hiserve.kernels import chosen_reference

SHAPE = AttentionShape(num_layers=2, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16)
SINKS = (torch.zeros(8), None)
# Of DeepSeek-V3.
LATENTS = dataclasses.replace(
    SHAPE, num_heads=128, num_kv_heads=1, head_dim=576, latent=LatentShape(512, 64, 128, 128, scale=0.1)
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_a_backend_is_opened_by_its_name() -> None:
    assert isinstance(open_attention("cpu", SHAPE, CPU), CpuAttention)
    assert isinstance(open_attention("reference", SHAPE, CPU), ReferenceAttention)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("name", "device", "changes", "trees", "fact"),
    [
        ("flashinfer", CUDA, {"sinks": SINKS}, False, "has no attention sinks"),
        ("flashinfer", CUDA, {"hides_first": True}, False, "has no hidden first positions"),
        ("flashinfer", CUDA, {"packs_rows": True}, False, "has no keys and values in 8 bits"),
        (
            "flashinfer",
            CUDA,
            {"hides_first": True, "sinks": SINKS},
            True,
            "sinks and no hidden first .* and no tree masks",
        ),
        ("flashinfer", CUDA, {"head_dim": 80}, False, "has no heads of 80 elements, only of 64, 128, 256"),
        ("flashinfer", CUDA, {"dtype": torch.float32}, False, "float32, only in bfloat16 and float16"),
        ("flashinfer", CUDA, {"num_heads": 64}, False, "at most 16 query heads for each KV head; the model has 32"),
        ("cpu", CUDA, {}, False, "does not run on cuda"),
    ],
)
def test_a_refusal_names_the_fact_and_the_backend_that_would_do(
    name: str, device: torch.device, changes: dict[str, Any], trees: bool, fact: str
) -> None:
    with pytest.raises(ConfigError, match=fact) as raised:
        open_attention(name, dataclasses.replace(SHAPE, **changes), device, has_trees=trees)
    assert raised.value.param == "attention_backend"
    assert raised.value.message.endswith("--attention-backend triton.")


@pytest.mark.parametrize(
    ("name", "changes", "fact"),
    [
        ("cpu", {"hides_first": True}, "has no hidden first positions"),
        ("triton", {}, "does not run on cpu"),
        ("flashinfer", {}, "does not run on cpu"),
    ],
)
def test_on_a_cpu_the_reference_does_what_the_fast_path_cannot(name: str, changes: dict[str, Any], fact: str) -> None:
    shape = dataclasses.replace(SHAPE, **changes)
    with pytest.raises(ConfigError, match=fact) as raised:
        open_attention(name, shape, CPU)
    would_do = fitting_backends(shape, CPU)[0]
    assert raised.value.message.endswith(f"--attention-backend {would_do}.")
    assert would_do == ("cpu" if name != "cpu" else "reference")


@pytest.mark.usefixtures("all_installed")
def test_more_query_heads_than_a_program_holds_are_for_the_reference() -> None:
    shape = dataclasses.replace(SHAPE, num_heads=256)
    assert fitting_backends(shape, CUDA) == ("triton", "reference")
    with pytest.raises(ConfigError, match="at most 128 query heads for each KV head; the model has 129"):
        open_attention("triton", dataclasses.replace(SHAPE, num_heads=129, num_kv_heads=1), CUDA)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"num_heads": 20}, "numbers of heads that divide 128, not for 20"),
        ({"latent": LatentShape(256, 64, 128, 128, scale=0.1)}, r"of \(512, 64\) elements, not of \(256, 64\)"),
        ({"hides_first": True}, "has no hidden first positions"),
        ({"dtype": torch.float32}, "float32, only in bfloat16 and float16"),
    ],
)
def test_flashinfer_computes_latents_of_its_sizes_alone(changes: dict[str, Any], fact: str) -> None:
    """Its kernel loses a key where a program ends inside a token, as with 20 heads."""
    assert fitting_backends(LATENTS, CUDA) == ("triton", "flashinfer", "reference")
    with pytest.raises(ConfigError, match=fact):
        open_attention("flashinfer", dataclasses.replace(LATENTS, **changes), CUDA)


def test_absorbed_queries_that_do_not_decode_are_flashinfers_on_hopper(hopper: dict[str, Any]) -> None:
    hopper.update(TritonLatentAttention=Fake, FlashInferLatentAttention=type("Prompts", (Fake,), {}))
    attention = open_attention("auto", LATENTS, CUDA)
    assert isinstance(attention, LatentAttention)
    pair = attention._absorbed
    assert isinstance(pair, PairedAttention)
    for each, kind in ((pair._decoding, Fake), (pair._prompts, hopper["FlashInferLatentAttention"])):
        assert type(each) is kind and (each.shape.latent, each.shape.head_dim) == (None, 576)
    alone = open_attention("auto", dataclasses.replace(LATENTS, num_heads=20), CUDA)
    assert isinstance(alone, LatentAttention) and isinstance(alone._absorbed, Fake)


def test_chosen_rows_are_tritons_beside_the_fastest_for_all_rows(hopper: dict[str, Any]) -> None:
    """Of steps whose rows are all chosen FlashInfer computes prompts; no graph needs lengths of the host."""
    hopper.update(TritonLatentAttention=Fake, FlashInferLatentAttention=type("Prompts", (Fake,), {}))
    shape = dataclasses.replace(LATENTS, index=IndexShape(width=128, most=2048))
    assert fitting_backends(shape, CUDA) == ("triton", "reference")
    attention = open_attention("auto", shape, CUDA, has_drafts=False)
    assert isinstance(attention, IndexedAttention) and not attention.needs_host_lengths
    plain = attention._plain
    assert isinstance(plain, LatentAttention) and isinstance(plain._absorbed, PairedAttention)
    with pytest.raises(ConfigError, match=r"has no attention to chosen tokens.*--attention-backend triton\."):
        open_attention("flashinfer", shape, CUDA)


@pytest.mark.usefixtures("all_installed")
def test_keys_of_an_index_that_triton_has_not_are_for_the_reference() -> None:
    for width in (8, 96):
        shape = dataclasses.replace(LATENTS, index=IndexShape(width=width, most=2048))
        assert fitting_backends(shape, CUDA) == ("reference",)
        attention = open_attention("reference", shape, CUDA)
        assert isinstance(attention, IndexedAttention) and attention._ops is chosen_reference
    with pytest.raises(ConfigError, match="has no keys of an index but of powers of 2 from 16 on"):
        open_attention("triton", shape, CUDA)


@pytest.mark.parametrize("num_heads", [20, 128])
@pytest.mark.parametrize("is_serving", [None, lambda: False])
def test_graphs_of_absorbed_queries_are_flashinfers_where_no_row_has_drafts(
    hopper: dict[str, Any], num_heads: int, is_serving: Any
) -> None:
    """Of any number of heads: rows of one token need no causal mode."""
    hopper.update(TritonLatentAttention=Fake, FlashInferLatentAttention=type("Graphs", (Fake,), {}))
    shape = dataclasses.replace(LATENTS, num_heads=num_heads)
    attention = open_attention("auto", shape, CUDA, has_drafts=False, is_serving=is_serving)
    assert isinstance(attention, LatentAttention) and attention.needs_host_lengths
    for num_rows in (1, 3, 4, 32):
        captured = attention.captured(num_rows, 1)
        assert isinstance(captured, LatentAttention)
        is_theirs = num_rows * num_heads >= 80
        assert type(captured._absorbed) is (hopper["FlashInferLatentAttention"] if is_theirs else Fake)
    ragged = attention.ragged()
    assert isinstance(ragged, LatentAttention) and type(ragged._absorbed) is Fake
    assert isinstance(attention._absorbed, PairedAttention if num_heads == 128 else GraphedAttention)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({}, {"has_drafts": True}),
        ({}, {"has_drafts": False, "has_trees": True}),
        ({"hides_first": True}, {"has_drafts": False}),
        ({"latent": LatentShape(256, 64, 128, 128, scale=0.1)}, {"has_drafts": False}),
        ({"latent": None, "num_kv_heads": 16, "head_dim": 128}, {"has_drafts": False}),
    ],
)
def test_graphs_read_lengths_on_the_device_where_there_may_be_drafts_or_flashinfer_does_not_fit(
    hopper: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    hopper.update(TritonLatentAttention=Fake, FlashInferLatentAttention=Fake)
    attention = open_attention("auto", dataclasses.replace(LATENTS, **changes), CUDA, **options)
    assert not attention.needs_host_lengths


@pytest.mark.parametrize("num_heads", [20, 128])
def test_expanded_prompts_are_flashinfers_whatever_the_heads(hopper: dict[str, Any], num_heads: int) -> None:
    hopper.update(TritonLatentAttention=Fake, FlashInferLatentAttention=Fake)
    attention = open_attention("auto", dataclasses.replace(LATENTS, num_heads=num_heads), CUDA)
    assert isinstance(attention, LatentAttention)
    assert isinstance(attention._kernel, FakePrompts) and attention._kernel.waits


@pytest.mark.parametrize("changes", [{"dtype": torch.float32}, {"latent": LatentShape(512, 64, 128, 64, scale=0.1)}])
def test_expanded_prompts_are_torchs_where_flashinfer_has_no_such_heads(
    hopper: dict[str, Any], changes: dict[str, Any]
) -> None:
    hopper.update(TritonLatentAttention=Fake, FlashInferLatentAttention=Fake)
    attention = open_attention("auto", dataclasses.replace(LATENTS, **changes), CUDA)
    assert isinstance(attention, LatentAttention) and attention._kernel is None


@pytest.mark.parametrize("error", [None, ConfigError("no nvcc"), ImportError("no nvcc")])
def test_expanded_prompts_wait_for_no_compiler_when_requests_are_to_be_served(
    hopper: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    hopper.update(TritonLatentAttention=Fake, FlashInferLatentAttention=Fake)
    state = {"serving": False, "compiled": False}
    monkeypatch.setattr(FakePrompts, "is_ready", lambda self: state["compiled"])
    monkeypatch.setattr(FakePrompts, "error", error)
    shape = dataclasses.replace(LATENTS, num_heads=20)
    attention = open_attention("auto", shape, CUDA, is_serving=lambda: state["serving"])
    assert isinstance(attention, LatentAttention)
    if error is not None:
        assert attention._kernel is None and "expanded prompts are computed by torch" in caplog.text
        return
    assert attention._kernel is not None
    ready = []
    for changed in ({}, {"compiled": True}, {"compiled": False, "serving": True}, {"compiled": True}):
        state.update(changed)
        ready.append(attention._kernel.is_ready())
    assert ready == [False, False, False, True]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package flashinfer, which is not installed\. Use reference"):
        open_attention("flashinfer", SHAPE, CUDA)


@pytest.mark.usefixtures("all_installed")
def test_sinks_that_no_layer_has_refuse_nothing() -> None:
    shape = dataclasses.replace(SHAPE, windows=(16, None), sinks=(None, None))
    assert fitting_backends(shape, CPU) == ("cpu", "reference")
    assert fitting_backends(shape, CUDA, has_trees=True) == ("triton", "reference")
    assert fitting_backends(shape, CUDA) == ("triton", "flashinfer", "reference")


class Fake:
    """A backend that is opened and no more."""

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape, *, waits: bool = True) -> None:
        self.shape = shape

    def is_ready(self) -> bool:
        return True

    def captured(self, num_rows: int, width: int) -> Fake:
        return self

    def ragged(self) -> Fake:
        return self

    def plan(self, inputs: Any) -> None:
        raise AssertionError(inputs)

    def forward(self, *tensors: Any, **named: Any) -> torch.Tensor:
        raise AssertionError(tensors)


class FakePrompts:
    """A kernel of expanded prompts that is opened and no more."""

    error: Exception | None = None

    def __init__(self, shape: AttentionShape, *, waits: bool = True) -> None:
        self.waits = waits
        if self.error is not None:
            raise self.error

    def is_ready(self) -> bool:
        return True

    def plan(self, *lengths: Any) -> None:
        raise AssertionError(lengths)

    def attend(self, *tensors: Any) -> None:
        raise AssertionError(tensors)


@pytest.fixture
def hopper(all_installed: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with an H200; what its modules hold may be replaced."""
    there: dict[str, Any] = {"TritonAttention": Fake, "FlashInferAttention": Fake, "ReferenceAttention": Fake}
    there["FlashInferPrompts"] = FakePrompts
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(**there))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return there


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("has_trees", [False, True])
def test_auto_decodes_with_triton_and_computes_prompts_with_flashinfer_on_hopper(has_trees: bool) -> None:
    """Prompts have no trees."""
    attention = open_attention("auto", SHAPE, CUDA, has_trees=has_trees)
    assert isinstance(attention, PairedAttention)
    assert not attention.needs_host_lengths


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("changes", [{"head_dim": 80}, {"sinks": SINKS}, {"dtype": torch.float32}])
def test_auto_is_triton_alone_where_flashinfer_does_not_fit(changes: dict[str, Any]) -> None:
    assert isinstance(open_attention("auto", dataclasses.replace(SHAPE, **changes), CUDA), Fake)


@pytest.mark.usefixtures("hopper")
def test_auto_is_triton_alone_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert isinstance(open_attention("auto", SHAPE, CUDA), Fake)


@pytest.mark.parametrize("has_compiled", [False, True])
def test_auto_waits_for_no_compiler_when_requests_are_to_be_served(hopper: dict[str, Any], has_compiled: bool) -> None:
    """Prompts change their backend when steps are those of requests and the compilers have ended, and not back."""
    state = {"compiled": has_compiled, "serving": False}

    class Slow(Fake):
        def __init__(self, shape: AttentionShape, *, waits: bool = True) -> None:
            assert not waits
            super().__init__(shape, waits=waits)

        def is_ready(self) -> bool:
            return state["compiled"]

    hopper["FlashInferAttention"] = Slow
    attention = open_attention("auto", SHAPE, CUDA, is_serving=lambda: state["serving"])
    assert isinstance(attention, PairedAttention)
    may_split = [attention._may_split()]
    for step in ({"compiled": True}, {"compiled": False, "serving": True}, {"compiled": True}):
        state.update(step)
        may_split.append(attention._may_split())
    assert may_split == ([True] * 4 if has_compiled else [False, False, False, True])


@pytest.mark.parametrize("error", [ConfigError("no nvcc"), ImportError("no nvcc")])
def test_auto_goes_on_with_triton_where_flashinfer_cannot_be_compiled(
    hopper: dict[str, Any], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(shape: AttentionShape, *, waits: bool = True) -> Fake:
        raise error

    hopper["FlashInferAttention"] = fail
    assert isinstance(open_attention("auto", SHAPE, CUDA), Fake)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "prompts are computed by triton, which is slower: no nvcc"
    ]
    with pytest.raises(type(error)):
        open_attention("flashinfer", SHAPE, CUDA)


@pytest.mark.parametrize(
    ("name", "changes", "opened", "told"),
    [
        ("auto", {}, "triton", ""),
        ("auto", {"dtype": torch.float64}, "reference", ""),
        ("triton", {"hides_first": True}, "triton", ""),
        ("triton", {"dtype": torch.float64}, "reference", "triton does not compute in float64"),
        ("flashinfer", {}, "triton", "flashinfer needs lengths from the host"),
        ("flashinfer", {"hides_first": True}, "triton", "flashinfer has no hidden first positions"),
        ("reference", {}, "reference", ""),
    ],
)
def test_drafts_attend_with_the_named_backend_or_with_the_best_that_reads_lengths_on_the_device(
    hopper: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    name: str,
    changes: dict[str, Any],
    opened: str,
    told: str,
) -> None:
    there = {each.name: type(each.name, (Fake,), {}) for each in _BACKENDS.values()}
    hopper.update(there)
    attention = open_draft_attention(name, dataclasses.replace(SHAPE, **changes), CUDA)
    assert type(attention) is there[_BACKENDS[opened].name]
    assert [told in record.message for record in caplog.records] == ([True] if told else [])


def test_drafts_attend_on_a_cpu_with_what_hides_the_first_token(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(open_draft_attention("cpu", SHAPE, CPU), CpuAttention)
    assert isinstance(open_draft_attention("auto", SHAPE, CPU), CpuAttention)
    assert not caplog.records
    assert isinstance(
        open_draft_attention("cpu", dataclasses.replace(SHAPE, hides_first=True), CPU), ReferenceAttention
    )
    (record,) = caplog.records
    assert record.message == "drafts attend with reference: the attention backend cpu has no hidden first positions"


def test_the_table_says_which_backends_need_lengths_from_the_host() -> None:
    """FlashInfer's module cannot be imported where it is not installed."""
    for name in ("triton", "cpu", "reference"):
        backend = _BACKENDS[name]
        kind = getattr(importlib.import_module(backend.module), backend.name)
        assert backend.has_device_lengths == (not kind.needs_host_lengths)
    assert not _BACKENDS["flashinfer"].has_device_lengths


def test_auto_is_the_first_that_fits_on_a_cpu() -> None:
    assert isinstance(open_attention("auto", SHAPE, CPU), CpuAttention)
    assert isinstance(open_attention("auto", dataclasses.replace(SHAPE, sinks=SINKS), CPU), CpuAttention)
    assert isinstance(open_attention("auto", SHAPE, CPU, has_trees=True), CpuAttention)
