"""``resolve``: no ``auto`` is left, everything fits in memory, or the error says what to lower."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from hiserve.config.flags import flag_of
from hiserve.config.options import DTYPE_BYTES, Options, flags, make_options
from hiserve.config.settings import Settings
from hiserve.core.devices import devices_of
from hiserve.core.kv_groups import CacheGroupSpec, CarriedBytes
from hiserve.core.machine import Machine
from hiserve.core.resolve import resolve
from hiserve.core.step_memory import DraftFacts, DraftShape, ModelFacts, StepShape
from hiserve.errors import ConfigError, HiserveError, ResourceError
from tests.helpers.model_facts import GIB, LAPTOP, LARGE, LARGE_HEAD, MIB, NANO, NANO_HEAD, SERVER

IN_DOCKER = msgspec.structs.replace(LAPTOP, shm_bytes=2 * GIB)
NAMED = {"host_cache_name": "n"}


def values(config: Options) -> dict[str, Any]:
    return {each.name: getattr(getattr(config, each.section), each.name) for each in flags().values()}


def test_defaults_on_cpu() -> None:
    resolved = resolve(make_options(), NANO, LAPTOP)
    assert values(resolved.settings) == values(make_options()) | {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 8192,
        "kv_pages": 2 * GIB // (16 * 2048 * 4),
        "kv_dtype": "bf16",
        "page_size": 16,
        "window_pages": 0,
        "tail_share": 0.0,
        "tail_every": 0,
        "max_running_requests": 32,
        "max_batched_tokens": 512,
        "overlap": 0,
        "cpu_threads": 3,
        "grammar_threads": 2,
        "host_cache_gib": 0.25,
        "graphs": "off",
        "spec": "off",
        "max_request_bytes": 8 * MIB,
    }


def test_defaults_on_cuda() -> None:
    resolved = resolve(make_options(), LARGE, SERVER)
    found = values(resolved.settings)
    assert found["device"] == "cuda"
    assert found["dtype"] == "bfloat16"
    assert (found["max_running_requests"], found["max_batched_tokens"], found["overlap"]) == (256, 8192, 1)
    assert (found["graphs"], found["attention_backend"]) == ("all", "auto")
    assert found["max_model_len"] == 131_072
    assert resolved.memory.parts["KV pool"] > 0.8 * (80 * GIB - resolved.memory.parts["weights"])


def test_what_was_given_stays() -> None:
    chosen = {
        "device": "cpu",
        "dtype": "float64",
        "max_model_len": 100,
        "kv_pages": 9,
        "kv_dtype": "bf16",
        "window_pages": 0,
        "max_running_requests": 3,
        "max_batched_tokens": 7,
        "overlap": 1,
        "cpu_threads": 2,
        "grammar_threads": 1,
        "host_cache_gib": 0.25,
        "graphs": "off",
        "spec": "off",
        "max_request_bytes": 1 * MIB,
    }
    resolved = resolve(make_options(**chosen), NANO, SERVER)
    assert values(resolved.settings) == values(make_options(**chosen)) | {
        "tail_share": 0.0,
        "tail_every": 0,
        "page_size": 16,
    }
    reasons = [line.partition(": ")[2] for line in resolved.decisions]
    assert reasons == 2 * ["no boundary needs a tail"] + [""] and resolved.decisions[-1] == "--page-size auto -> 16"


def test_pages_hold_whole_rows_of_several_tokens() -> None:
    """And their bytes are those of fewer rows."""
    rare = msgspec.structs.replace(NANO, ratio_elements=((512, 4), (64, 128)), page_size=128, page_multiple=128)
    resolved = resolve(make_options(), rare, LAPTOP)
    assert resolved.settings.cache.page_size == 128
    assert resolved.memory.page_bytes == 4 * (128 * NANO.slot_elements + 32 * 512 + 64)
    assert resolve(make_options(page_size=256), rare, LAPTOP).settings.cache.page_size == 256
    with pytest.raises(ConfigError, match="--page-size is 64, but rows of this model stand for up to 128 tokens"):
        resolve(make_options(page_size=64), rare, LAPTOP)


@pytest.mark.parametrize(("length", "num_bytes"), [(10_000, 8 * MIB), (1_000_000, 32_000_000), (70_000_000, 2**31 - 1)])
def test_a_body_has_room_for_the_longest_prompt_within_what_a_setting_may_be(length: int, num_bytes: int) -> None:
    model = msgspec.structs.replace(NANO, context_length=length)
    machine = msgspec.structs.replace(LAPTOP, memory_bytes=2**46)
    options = make_options(max_running_requests=1, kv_pages=1 + length // 16 + 1, host_cache_gib=0)
    assert resolve(options, model, machine).settings.server.max_request_bytes == num_bytes


def test_one_decision_a_line() -> None:
    lines = resolve(make_options(page_size=8), NANO, LAPTOP).decisions
    assert "--device auto -> cpu" in lines
    assert "--cpu-threads auto -> 3" in lines
    assert not any("page-size" in line for line in lines)
    assert (
        len(lines) == sum(value == "auto" for value in values(make_options()).values()) - 7
    )  # page_size is given, and load_format, reply_format, thoughts, attention_backend, graph_max_len and spec_steps stay


@pytest.mark.parametrize(
    ("draft", "given", "spec", "why"),
    [
        (None, {}, "off", "no head came with the model"),
        (NANO_HEAD, {}, "eagle3", "this head came with the model"),
        (NANO_HEAD, {"max_model_len": 13}, "eagle3", "this head came with the model"),
        (NANO_HEAD, {"max_model_len": 12}, "off", "requests of 12 tokens are too short to measure what drafts cost"),
        (NANO_HEAD, {"max_model_len": 12, "spec_steps": 3}, "eagle3", "this head came with the model"),
    ],
)
def test_who_drafts_is_the_head_that_came_with_the_model(
    draft: DraftFacts | None, given: dict[str, Any], spec: str, why: str
) -> None:
    resolved = resolve(make_options(**given), msgspec.structs.replace(NANO, draft=draft), LAPTOP)
    assert resolved.settings.spec.spec == spec
    assert resolved.settings.spec.spec_steps == given.get("spec_steps", "auto")
    assert f"--spec auto -> {spec}: {why}" in resolved.decisions


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(1, 1, 1), (2, 1, 1), (9, 1, 8), (9, 2, 4), (3, 8, 1)])
def test_threads_are_the_cores_less_one_shared_among_replicas(cores: int, replicas: int, threads: int) -> None:
    machine = msgspec.structs.replace(LAPTOP, cores=cores)
    assert resolve(make_options(replicas=replicas), NANO, machine).settings.runner.cpu_threads == threads


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(1, 1, 1), (2, 1, 1), (9, 1, 4), (9, 2, 2), (64, 2, 8)])
def test_masks_are_computed_in_half_of_the_cores_shared_among_replicas(cores: int, replicas: int, threads: int) -> None:
    machine = msgspec.structs.replace(LAPTOP, cores=cores)
    assert resolve(make_options(replicas=replicas), NANO, machine).settings.runner.grammar_threads == threads


def test_each_replica_has_a_device_of_its_own_and_its_memory_is_not_shared() -> None:
    two = msgspec.structs.replace(SERVER, cuda_memory_bytes=(80 * GIB, 40 * GIB, 24 * GIB))
    one_of = {"host_cache_gib": 0}
    alone = resolve(make_options(**one_of), LARGE, two)
    assert alone.settings.parallel.devices == "0"
    assert "--devices None -> 0" in alone.decisions
    both = resolve(make_options(**one_of, replicas=2), LARGE, two)
    assert devices_of(both.settings) == (0, 1)
    assert both.memory.parts == resolve(make_options(**one_of, devices="1"), LARGE, two).memory.parts, (
        "the smaller one decides"
    )
    assert alone.memory.parts["KV pool"] > both.memory.parts["KV pool"]
    chosen = resolve(make_options(**one_of, replicas=2, devices="2,0"), LARGE, two)
    assert devices_of(chosen.settings) == (2, 0)
    assert chosen.memory.parts == resolve(make_options(**one_of, devices="2"), LARGE, two).memory.parts


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": "3"}, "there is no CUDA device 3: 3 were found"),
        ({"devices": "1,1", "replicas": 2}, "names a device twice"),
        ({"devices": "1", "replicas": 2}, "1 of them for 2 replicas"),
        ({"devices": "0,1"}, "2 of them for 1 replicas"),
        ({"replicas": 4}, "--replicas is 4 but 3 CUDA devices were found"),
        ({"devices": "cuda:1"}, "give the numbers of CUDA devices"),
        ({"devices": "-1"}, "give the numbers of CUDA devices"),
        ({"devices": "0,"}, "give the numbers of CUDA devices"),
        ({"devices": "0", "device": "cpu"}, "but the model runs on cpu"),
    ],
)
def test_devices_that_cannot_be_had_are_refused(settings: dict[str, Any], words: str) -> None:
    three = msgspec.structs.replace(SERVER, cuda_memory_bytes=(80 * GIB,) * 3)
    with pytest.raises(ConfigError, match=re.escape(words)) as refusal:
        resolve(make_options(**settings), LARGE, three)
    assert refusal.value.param in ("devices", "replicas")


def test_replicas_share_the_memory() -> None:
    small = msgspec.structs.replace(LAPTOP, memory_bytes=GIB)
    pools = [resolve(make_options(replicas=count), NANO, small).memory.parts["KV pool"] for count in (1, 2)]
    assert pools[1] < 0.55 * pools[0]


def test_ranks_of_all_replicas_share_the_memory_of_the_host() -> None:
    """A model's facts are those of a share, so that only what a rank may take differs here."""
    small, given = msgspec.structs.replace(LAPTOP, memory_bytes=GIB), {"max_model_len": 1024, "cpu_threads": 1}
    four = [
        resolve(make_options(**given, **each), NANO, small).memory
        for each in ({"replicas": 4}, {"replicas": 2, "tp": 2})
    ]
    assert four[0].parts["KV pool"] == four[1].parts["KV pool"]
    server = msgspec.structs.replace(SERVER, cuda_memory_bytes=(80 * GIB,) * 4)
    alone, group = (resolve(make_options(**each), LARGE, server).settings.cache for each in ({}, {"tp": 4}))
    assert group.kv_pages == alone.kv_pages
    assert 0 < group.host_cache_gib < 0.3 * alone.host_cache_gib


@pytest.mark.parametrize(
    ("machine", "given", "words", "param"),
    [
        (
            LAPTOP,
            {"replicas": 2},
            "for each worker. Lower --replicas, use a narrower --dtype or a smaller model.",
            "replicas",
        ),
        (LAPTOP, {"tp": 2}, "for each rank. Use a narrower --dtype or a smaller model.", "dtype"),
        (SERVER, {}, "for each worker. Use a narrower --dtype or a smaller model, or raise --tp.", "dtype"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_helps(
    machine: Machine, given: dict[str, Any], words: str, param: str
) -> None:
    vast = msgspec.structs.replace(LARGE, num_params=2**42)
    with pytest.raises(ResourceError, match=re.escape(words)) as refusal:
        resolve(make_options(**given), vast, machine)
    assert refusal.value.param == param


def test_a_pool_is_no_larger_than_its_rows_can_use() -> None:
    resolved = resolve(make_options(max_running_requests=1, max_model_len=64), NANO, LAPTOP)
    assert resolved.settings.cache.kv_pages == 1 + 4


@pytest.mark.parametrize(
    ("given", "machine", "host_bytes"),
    [
        ({}, LAPTOP, GIB // 4),
        ({"kv_pages": 11}, LAPTOP, 2 * 11 * 16 * 2048 * 4),
        ({"replicas": 2, "kv_pages": 1000}, LAPTOP, 2 * 1000 * 16 * 2048 * 4),
        (NAMED, msgspec.structs.replace(LAPTOP, shm_bytes=64 * MIB), 32 * MIB),
        ({**NAMED, "replicas": 2}, msgspec.structs.replace(LAPTOP, shm_bytes=64 * MIB), 16 * MIB),
        (NAMED, msgspec.structs.replace(IN_DOCKER, kept_bytes=1500 * MIB), 1500 * MIB),
        ({"host_cache_gib": 0}, LAPTOP, 0),
        ({"host_cache_gib": 3, "disable_prefix_cache": True}, LAPTOP, 0),
    ],
)
def test_the_host_cache_follows_memory_and_pool(given: dict[str, Any], machine: Machine, host_bytes: int) -> None:
    resolved = resolve(make_options(**given), NANO, machine)
    assert resolved.settings.cache.host_cache_gib == host_bytes / GIB
    assert resolved.memory.parts.get("host cache", 0) == host_bytes
    assert resolved.memory.host_parts == {}


@pytest.mark.parametrize("given", [{"host_cache_gib": 0}, {"disable_prefix_cache": True}])
def test_a_store_without_a_host_cache_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--store is 'file:d' but --host-cache-gib is 0") as caught:
        resolve(make_options(store="file:d", **given), NANO, LAPTOP)
    assert caught.value.param == "store"
    assert ("disabled" in caught.value.message) == ("disable_prefix_cache" in given)


def test_a_secret_without_a_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no --store") as caught:
        resolve(make_options(store_secret_file="secret"), NANO, LAPTOP)
    assert caught.value.param == "store_secret_file"


def test_on_cuda_the_host_cache_lies_beside_the_device_and_its_pages_pass_through_the_device() -> None:
    resolved = resolve(make_options(host_cache_gib=40), LARGE, SERVER)
    assert resolved.settings.cache.host_cache_gib == 40
    assert resolved.memory.host_parts == {"host cache": 40 * GIB}
    assert "host cache" not in resolved.memory.parts
    assert resolved.memory.parts["staging of host pages"] == 160 * MIB
    assert "staging of host pages" not in resolve(make_options(host_cache_gib=0), LARGE, SERVER).memory.parts


def test_a_host_cache_takes_no_more_than_a_quarter_of_what_is_left() -> None:
    resolved = resolve(make_options(), NANO, msgspec.structs.replace(LAPTOP, memory_bytes=GIB))
    size = resolved.memory.parts.pop("host cache")
    assert size == (GIB - sum(resolved.memory.parts.values())) // 4


def test_a_host_cache_of_less_than_two_pages_is_none_and_says_why() -> None:
    config = make_options(host_cache_name="n", disable_prefix_cache=False)
    resolved = resolve(config, NANO, msgspec.structs.replace(LAPTOP, shm_bytes=300_000))
    assert resolved.settings.cache.host_cache_gib == 0
    (line,) = [line for line in resolved.decisions if line.startswith("--host-cache-gib")]
    assert line == "--host-cache-gib auto -> 0: 0.00014 GiB would hold fewer than two pages of 0.00012 GiB"


@pytest.mark.parametrize(
    ("given", "model", "machine", "reasons"),
    [
        ({}, NANO, LAPTOP, ("2.00 GiB are the most on cpu", "the model's context", "the most on cpu")),
        ({"kv_pages": 9, "max_model_len": 64, "host_cache_gib": 0}, NANO, LAPTOP, ("as given",) * 3),
        ({"kv_pages": 9}, NANO, LAPTOP, ("as given", "all that the KV pool holds", "twice the KV pool")),
        (
            {"max_running_requests": 2, "max_model_len": 64},
            NANO,
            LAPTOP,
            ("as many as 2 requests of 64 tokens fill", "as given", "twice the KV pool"),
        ),
        (
            {},
            NANO,
            msgspec.structs.replace(LAPTOP, memory_bytes=GIB),
            (
                "a quarter of the memory beside the weights",
                "the model's context",
                "a quarter of the memory that is left",
            ),
        ),
        (
            {},
            LARGE,
            SERVER,
            ("all memory beside weights, tables and steps", "the model's context", "half of the memory that is left"),
        ),
    ],
)
def test_each_size_has_its_reason_and_is_decided_with_it(
    given: dict[str, Any], model: ModelFacts, machine: Machine, reasons: tuple[str, str, str]
) -> None:
    resolved = resolve(make_options(**given), model, machine)
    assert [line.partition(": ")[2] for line in resolved.memory.lines()] == list(reasons)
    settings = values(resolved.settings)
    for name, reason in zip(("kv_pages", "max_model_len", "host_cache_gib"), reasons, strict=True):
        decision = [line for line in resolved.decisions if line.startswith(flag_of(name))]
        assert [line.partition(": ")[2] for line in decision] == ([] if reason == "as given" else [reason])
    assert f"{settings['kv_pages']:,} KV pages" in resolved.memory.lines()[0]
    assert f"up to {settings['max_model_len']:,} tokens" in resolved.memory.lines()[1]


def test_the_longest_request_shrinks_to_the_pool_when_nobody_chose_it() -> None:
    assert resolve(make_options(kv_pages=5, page_size=8), NANO, LAPTOP).settings.model.max_model_len == 32


REFUSED: list[tuple[str, dict[str, Any], ModelFacts, Machine, type[HiserveError], str]] = [
    ("no device", {"device": "cuda"}, NANO, LAPTOP, ConfigError, "--device"),
    ("beyond the context", {"max_model_len": 8193}, NANO, LAPTOP, ConfigError, "--max-model-len"),
    ("weights", {}, LARGE, LAPTOP, ResourceError, "--dtype"),
    ("weights of all", {"replicas": 1000}, NANO, LAPTOP, ResourceError, "--replicas"),
    (
        "exactly the weights",
        {},
        NANO,
        msgspec.structs.replace(LAPTOP, memory_bytes=7_344_384 * 4),
        ResourceError,
        "dtype",
    ),
    ("pages", {"kv_pages": 10**8}, NANO, LAPTOP, ResourceError, "--kv-pages"),
    ("a huge page", {"page_size": 10**6}, NANO, LAPTOP, ResourceError, "--page-size"),
    ("tables", {"max_running_requests": 10**6}, NANO, LAPTOP, ResourceError, "--max-running-requests"),
    ("a huge step", {"max_batched_tokens": 10**6, "kv_pages": 9000}, LARGE, SERVER, ResourceError, "batched-tokens"),
    ("a step and a page", {"max_batched_tokens": 10**6}, LARGE, SERVER, ResourceError, "--max-batched-tokens"),
    ("graphs on cpu", {"graphs": "all"}, NANO, LAPTOP, ConfigError, "--graphs is all but the model runs on cpu"),
    ("graphs of decode on cpu", {"graphs": "decode", "device": "cpu"}, NANO, SERVER, ConfigError, "--graphs is dec"),
    ("triton on cpu", {"attention_backend": "triton"}, NANO, LAPTOP, ConfigError, "--attention-backend is triton"),
    ("flashinfer on cpu", {"attention_backend": "flashinfer"}, NANO, LAPTOP, ConfigError, "use reference"),
    ("pool below the length", {"kv_pages": 4, "max_model_len": 64}, NANO, LAPTOP, ConfigError, "--kv-pages"),
    ("pool below two tokens", {"kv_pages": 2, "page_size": 1}, NANO, LAPTOP, ConfigError, "--kv-pages"),
    ("host cache", {"host_cache_gib": 14}, NANO, LAPTOP, ResourceError, r"14.00 GiB but 13.\d\d GiB of memory"),
    ("host caches", {"host_cache_gib": 7, "replicas": 2}, NANO, LAPTOP, ResourceError, "--host-cache-gib"),
    ("host cache in /dev/shm", {"host_cache_gib": 3, **NAMED}, NANO, IN_DOCKER, ResourceError, "2.00 GiB of /dev/shm"),
    (
        "host cache of one page",
        {"host_cache_gib": 1e-5},
        NANO,
        LAPTOP,
        ConfigError,
        "--host-cache-gib is 1e-05 but two",
    ),
    ("no memory at all", {}, NANO, msgspec.structs.replace(LAPTOP, memory_bytes=0), ResourceError, "dtype"),
]


@pytest.mark.parametrize(
    ("given", "model", "machine", "kind", "flag"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
def test_what_does_not_fit_names_what_to_change(
    given: dict[str, Any], model: ModelFacts, machine: Machine, kind: type[HiserveError], flag: str
) -> None:
    with pytest.raises(kind, match=flag) as refused:
        resolve(make_options(**given), model, machine)
    assert refused.value.param in flags()
    assert "-1" not in refused.value.message


def test_a_canary_is_part_of_every_page() -> None:
    plain, watched = (resolve(make_options(kv_pages=64, kv_canary=is_on), NANO, LAPTOP) for is_on in (False, True))
    assert (
        watched.memory.parts["KV pool"] - plain.memory.parts["KV pool"] == 64 * 16 * 2 * 4
    )  # token and position, an int32 each


def test_a_pool_of_exactly_the_longest_request_is_enough() -> None:
    assert resolve(make_options(kv_pages=5, max_model_len=64), NANO, LAPTOP).settings.cache.kv_pages == 5


def magnitudes(most: int, least: int = 1) -> st.SearchStrategy[int]:
    """Numbers of every size, small and large ones alike."""
    sizes = st.integers(least.bit_length(), most.bit_length())
    return sizes.flatmap(lambda bits: st.integers(least, min(most, 2**bits)))


machines = st.builds(
    Machine,
    cores=st.integers(1, 256),
    memory_bytes=magnitudes(2**40, 10 * MIB),
    shm_bytes=magnitudes(2**40),
    cuda_memory_bytes=st.lists(magnitudes(2**38, GIB), max_size=4).map(tuple),
)
shapes = st.builds(
    StepShape,
    num_layers=st.integers(1, 128),
    hidden_size=magnitudes(2**14),
    num_heads=st.integers(1, 64).map(lambda half: half * 2),
    num_kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([64, 80, 128]),
    mlp_elements=magnitudes(2**17),
    vocab_size=st.integers(1, 200_000),
)
without_windows = st.builds(
    ModelFacts,
    context_length=magnitudes(2**31 - 1).map(lambda length: length + 1),
    checkpoint_dtype=st.sampled_from(list(DTYPE_BYTES)),
    num_params=magnitudes(10**10),
    slot_elements=magnitudes(2**18).map(lambda half: half * 2),
    step=shapes,
    draft=st.none()
    | st.builds(
        DraftFacts,
        kind=st.just("mtp"),
        num_params=magnitudes(10**9),
        slot_elements=magnitudes(2**14).map(lambda half: half * 2),
        step=st.builds(DraftShape, step=shapes, shown_elements=magnitudes(2**15), feature_size=magnitudes(2**14)),
    ),
)


def with_windows(model: ModelFacts, window: int, share: int) -> ModelFacts:
    """Gives some of the layers a window."""
    elements = model.slot_elements // share // 2 * 2 if window else 0
    return msgspec.structs.replace(model, window=window if elements else 0, window_elements=elements)


def with_states(model: ModelFacts, snapshot: int, ring: int) -> ModelFacts:
    """Gives rows states to carry along."""
    if not snapshot:
        return model
    sizes = {
        name: dict.fromkeys(DTYPE_BYTES, size) for name, size in (("row", snapshot + ring), ("snapshot", snapshot))
    }
    return msgspec.structs.replace(model, carried=CarriedBytes(draft=dict.fromkeys(DTYPE_BYTES, ring), **sizes))


models = st.builds(
    with_states,
    st.builds(
        with_windows, without_windows, window=st.just(0) | magnitudes(10**5, 2), share=st.sampled_from([2, 3, 20])
    ),
    snapshot=st.just(0) | magnitudes(10**9),
    ring=st.sampled_from([0, 4096]),
)
givens = st.fixed_dictionaries(
    {"page_size": st.sampled_from([1, 7, 16, 256]), "replicas": st.integers(1, 4)},
    optional={
        "devices": st.sampled_from(["0", "1", "1,0", "2,0,1", "0,0", "", "9999", "x"]),
        "kv_pages": magnitudes(10**6).map(lambda pages: pages + 1),
        "window_pages": st.just(0) | magnitudes(10**6),
        "max_model_len": magnitudes(10**6).map(lambda length: length + 1),
        "max_running_requests": magnitudes(10**5),
        "dtype": st.sampled_from(list(DTYPE_BYTES)),
        "max_batched_tokens": magnitudes(10**5),
        "graphs": st.sampled_from(["off", "decode", "all"]),
        "device": st.sampled_from(["cpu", "cuda"]),
        "host_cache_gib": st.sampled_from([0.0, 0.001, 1.0, 30.0]),
        "host_cache_name": st.just("n"),
        "spec": st.sampled_from(["off", "mtp", "ngram"]),
        "spec_steps": st.sampled_from(["auto", 0, 7]),
    },
)


@trials(deadline=None, max_examples=300)
@given(machine=machines, model=models, given=givens)
def test_whatever_the_machine_all_of_it_fits_or_a_typed_error_names_a_setting(
    machine: Machine, model: ModelFacts, given: dict[str, Any]
) -> None:
    config = make_options(**given)
    try:
        resolved = resolve(config, model, machine)
    except (ConfigError, ResourceError) as error:
        refusal: HiserveError | None = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.param in flags()
        assert "--" in refusal.message
        return
    assert resolve(config, model, machine) == resolved
    found = values(resolved.settings)
    assert [name for name, value in found.items() if value == "auto"] == [
        "load_format",
        "reply_format",
        "thoughts",
        "attention_backend",
        "graph_max_len",
        *(["spec_steps"] if given.get("spec_steps", "auto") == "auto" else []),
    ]
    assert {name: found[name] for name in given} == given, "what was given was changed"
    on_cpu = found["device"] == "cpu"
    if on_cpu:
        assert sum(resolved.memory.parts.values()) * found["replicas"] <= machine.memory_bytes
    else:
        devices = devices_of(resolved.settings)
        assert len(devices) == found["replicas"]
        assert all(sum(resolved.memory.parts.values()) <= machine.cuda_memory_bytes[number] for number in devices)
    assert sum(resolved.memory.host_parts.values()) * found["replicas"] <= machine.memory_bytes
    items = resolved.memory.parts if on_cpu else resolved.memory.host_parts
    host_bytes = items.get("host cache", 0)
    assert host_bytes == int(found["host_cache_gib"] * GIB)
    if found["host_cache_name"]:
        assert host_bytes * found["replicas"] <= machine.shm_bytes
    elements = model.slot_elements - (model.window_elements if found["window_pages"] else 0)
    group = CacheGroupSpec(name="kv", num_layers=1, num_kv_heads=1, head_dim=elements // 2, dtype=found["dtype"])
    assert resolved.memory.parts["weights"] == model.num_params * DTYPE_BYTES[found["dtype"]]
    assert resolved.memory.parts["KV pool"] == found["kv_pages"] * found["page_size"] * group.slot_bytes
    pool_tokens = (resolved.settings.cache.kv_pages - 1) * found["page_size"]
    assert 2 <= found["max_model_len"] <= min(pool_tokens, model.context_length)
    assert found["cpu_threads"] >= 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(resolved.settings), type=Settings) == resolved.settings
    assert resolve(resolved.settings, model, machine).settings == resolved.settings


def test_the_tables_of_rows_are_no_larger_than_planned() -> None:
    from hiserve.cache.index.prefix_cache import PrefixCache
    from hiserve.engine.rows import RowState
    from hiserve.runners.device_rows import DeviceRows

    for page_size in (1, 16):
        resolved = resolve(
            make_options(max_running_requests=7, max_model_len=500, kv_pages=600, page_size=page_size), NANO, LAPTOP
        )
        device = DeviceRows(7, 500, page_size, 600, "cpu")
        cache = PrefixCache(num_pages=600, page_size=page_size, namespace=b"")
        host = RowState(cache, 7, 500)
        tables = (device.tokens, device.page_table, device.entry_owner, host.tokens, host.tables.pages)
        assert sum(table.nbytes for table in tables) == resolved.memory.parts["token and page tables"]


def test_on_cuda_the_pool_takes_what_a_step_leaves() -> None:
    small, large = (
        resolve(make_options(max_batched_tokens=tokens), LARGE, SERVER).memory.parts for tokens in (2048, 16_384)
    )
    assert sum(large.values()) <= 80 * GIB < sum(large.values()) + 16 * 65_536 * 2  # a page more would not fit
    per_token = (large["activations of the largest step"] - small["activations of the largest step"]) / 14_336
    assert 2 * (3 * 14_336 + 4096) < per_token < 2 * 80_000
    assert small["KV pool"] > large["KV pool"]


@pytest.mark.parametrize("memory_gib", [30, 80, 141])
def test_on_cuda_windows_have_a_pool_of_their_own_and_their_model_holds_more_tokens(memory_gib: int) -> None:
    """Half of the layers have a window, of 128 tokens."""
    machine = msgspec.structs.replace(SERVER, cuda_memory_bytes=(memory_gib * GIB,))
    model = msgspec.structs.replace(LARGE, window=128, window_elements=LARGE.slot_elements // 2)
    given = {"host_cache_gib": 0, "max_batched_tokens": 2048}
    freed, kept = (resolve(make_options(**given, **of), model, machine) for of in ({}, {"window_pages": 0}))
    assert freed.settings.cache.frees_windows and not kept.settings.cache.frees_windows
    assert sum(freed.memory.parts.values()) <= memory_gib * GIB
    assert freed.settings.cache.kv_pages >= 1.5 * kept.settings.cache.kv_pages
    beside_host = resolve(make_options(max_batched_tokens=2048), model, machine)
    assert beside_host.settings.cache.frees_windows and beside_host.settings.cache.host_cache_gib > 0
    assert beside_host.memory.parts["staging of host pages"] == 160 * MIB


def test_images_larger_than_the_staging_memory_of_pages_have_room() -> None:
    """Layers with a window have five eighths of the bytes: an image takes two pages of the host."""
    elements = LARGE.slot_elements
    model = msgspec.structs.replace(LARGE, window=1024, window_elements=elements * 5 // 8)
    given = {"page_size": 2816, "max_batched_tokens": 2048}
    parts = resolve(make_options(**given), model, SERVER).memory.parts
    page = 2816 * 2 * elements * 3 // 8
    assert parts["staging of host pages"] == 4 * 2 * page > 160 * MIB


def test_graphs_are_paid_for_only_where_they_are_captured() -> None:
    held = [
        resolve(make_options(graphs=graphs), LARGE, SERVER).memory.parts.get("captured graphs", 0)
        for graphs in ("off", "decode", "all")
    ]
    assert held[0] == 0 < held[1] < held[2]


def test_graphs_of_every_size_keep_their_page_tables() -> None:
    from hiserve.runners.capture import row_buckets

    memory = [resolve(make_options(page_size=size, max_running_requests=64), LARGE, SERVER).memory for size in (1, 16)]
    in_a_step, in_graphs = (
        memory[0].parts[name] - memory[1].parts[name] for name in ("activations of the largest step", "captured graphs")
    )
    entries = 131_072 - 131_072 // 16
    assert in_a_step == 64 * entries * 4
    assert in_graphs >= sum(row_buckets(64)) * entries * 4


def test_steps_and_graphs_have_a_table_of_window_pages_too() -> None:
    model = msgspec.structs.replace(LARGE, window=128, window_elements=LARGE.slot_elements // 2)
    given = {"host_cache_gib": 0, "max_running_requests": 64, "max_model_len": 65_536}
    kept, freed = (resolve(make_options(**given, **of), model, SERVER).memory.parts for of in ({"window_pages": 0}, {}))
    table = 64 * 65_536 // 16 * 4
    assert freed["activations of the largest step"] - kept["activations of the largest step"] == table
    assert freed["captured graphs"] - kept["captured graphs"] > 2 * table


def with_drafts(graphs: str = "all", **given: Any) -> dict[str, int]:
    model = msgspec.structs.replace(LARGE, draft=LARGE_HEAD)
    return resolve(make_options(spec="auto", graphs=graphs, **given), model, SERVER).memory.parts


def test_what_drafts_take_is_shown_and_the_pool_leaves_room_for_it() -> None:
    plain, drafting = resolve(make_options(spec="off"), LARGE, SERVER).memory.parts, with_drafts()
    assert drafting.keys() - plain.keys() == {
        "draft weights",
        "KV pool of drafts",
        "features and drafts",
        "captured graphs of drafts",
    }
    assert (drafting["weights"], drafting["draft weights"]) == (plain["weights"], 2 * LARGE_HEAD.num_params)
    pages = drafting["KV pool"] // (16 * 65_536 * 2)
    assert drafting["KV pool of drafts"] == pages * 2 * (16 * 2048 + 2 * 4096)  # the keys of a page hold its boundary
    page = drafting["KV pool"] // pages + drafting["KV pool of drafts"] // pages
    assert sum(drafting.values()) <= 80 * GIB < sum(drafting.values()) + page  # a page more would not fit
    assert pages < plain["KV pool"] // (16 * 65_536 * 2)
    # Of every token of the largest step the model shows this much, and of every size of graph something stays.
    assert drafting["features and drafts"] >= 8192 * 3 * 4096 * 2
    assert drafting["captured graphs"] > plain["captured graphs"]
    assert "captured graphs of drafts" not in with_drafts("off")
    assert with_drafts("decode")["captured graphs of drafts"] < drafting["captured graphs of drafts"]


def test_drafts_of_every_number_keep_their_logits_for_each_size_of_graph() -> None:
    from hiserve.runners.capture import row_buckets

    drafting = {steps: with_drafts(spec_steps=steps, max_running_requests=64) for steps in (1, 3)}
    logits = sum(row_buckets(64)) * 128_256 * 2
    assert drafting[3]["captured graphs"] - drafting[1]["captured graphs"] >= (4 - 2) * logits
    # Those of the drafts are kept once.
    apart = drafting[3]["captured graphs of drafts"] - drafting[1]["captured graphs of drafts"]
    assert drafting[1]["captured graphs of drafts"] > logits and apart < logits


def test_drafts_that_look_for_repetitions_take_what_verifying_them_takes() -> None:
    plain, ngram = (resolve(make_options(spec=spec), LARGE, SERVER).memory.parts for spec in ("off", "ngram"))
    assert plain.keys() == ngram.keys()
    assert ngram["captured graphs"] > 2 * plain["captured graphs"]
    assert ngram["logits, drawing and scores"] - plain["logits, drawing and scores"] == 5 * 256 * 128_256 * 2


def test_scored_prompts_take_no_more_than_a_step_may_score() -> None:
    drawing = [
        resolve(make_options(max_batched_tokens=tokens), LARGE, SERVER).memory.parts["logits, drawing and scores"]
        for tokens in (8192, 32_768)
    ]
    assert drawing[0] == drawing[1]


def test_sizes_of_graphs_are_no_more_than_planned() -> None:
    from hiserve.core.step_memory import (
        CHAIN_GRAPHS,
        MAX_PIECE_TOKENS,
        NUM_BUCKETS,
        ROW_BUCKETS,
        ROW_GRAPHS,
        TOKEN_BUCKETS,
    )
    from hiserve.runners.capture import row_buckets, token_buckets
    from hiserve.runners.draft_graphs import NUM_WARMUP_DRAFTS
    from hiserve.runners.graph import DRAWINGS

    assert 1 + len(DRAWINGS) <= ROW_GRAPHS
    assert NUM_WARMUP_DRAFTS + 1 <= CHAIN_GRAPHS  # each way of drawing a draft, and what computes it
    for most in (*range(1, 600), 10_000):
        rows, tokens = row_buckets(most), token_buckets(most)
        assert max(len(rows), len(tokens)) <= NUM_BUCKETS
        assert sum(rows) <= ROW_BUCKETS * most
        assert sum(tokens) <= TOKEN_BUCKETS * min(most, MAX_PIECE_TOKENS), most
        assert tokens[-1] <= MAX_PIECE_TOKENS
