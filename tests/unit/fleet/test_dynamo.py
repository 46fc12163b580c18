"""The adapter between Dynamo's requests and ours; Dynamo itself is not needed for it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hiserve.config.options import make_options
from hiserve.core.plan import Scores
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.errors import ConfigError, RequestError
from hiserve.ipc.updates import TokenDelta
from tests.helpers.fake_engine_client import FakeEngineClient

NAME = "hiserve.fleet.dynamo"


class InvalidArgumentError(Exception):
    pass


@dataclass
class Values:
    """Stands for a class of values of Dynamo."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Context:
    def id(self) -> str:
        return "one"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with stand-ins for Dynamo's."""
    backend = {"LLMEngine": object} | dict.fromkeys(("EngineConfig", "LlmRegistration", "WorkerConfig"), Values)
    contents: dict[str, dict[str, Any]] = {
        "dynamo": {},
        "dynamo.common": {},
        "dynamo.common.backend": backend,
        "dynamo.common.backend.publisher": {"ZmqSource": Values},
        "dynamo.common.backend.run": {"run": None},
        "dynamo.llm": {},
        "dynamo.llm.exceptions": {"InvalidArgument": InvalidArgumentError},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def test_requests_become_parameters(adapter: Any) -> None:
    request = {
        "sampling_options": {
            "temperature": 0.5,
            "top_p": None,
            "n": 1,
            "logit_bias": {"7": 2.0},
            "presence_penalty": 0.1,
        },
        "stop_conditions": {
            "max_tokens": 9,
            "ignore_eos": True,
            "stop_token_ids": [5],
            "stop_token_ids_hidden": [5, 6, 10],
        },
        "output_options": {"logprobs": 2},
    }
    assert adapter.sampling_of(request, SamplingParams(top_p=0.9), 77, 10) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        logit_bias={7: 2.0},
        presence_penalty=0.1,
        seed=77,
        max_tokens=9,
        ignore_eos=True,
        stop_token_ids=(5, 6),
        logprobs=2,
    )
    assert adapter.sampling_of({"sampling_options": {"seed": 3}}, SamplingParams(), 77, 10).seed == 3


@pytest.mark.parametrize("options", [{"n": 2}, {"guided_decoding": {"regex": "a"}}, {"temperature": -1.0}])
def test_what_is_not_built_or_out_of_range_is_refused(adapter: Any, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        adapter.sampling_of({"sampling_options": options}, SamplingParams(), 0, 10)


def test_tokens_become_chunks_with_their_scores(adapter: Any) -> None:
    logprobs, tops = np.array([-0.5, -2.0], np.float32), np.array([[4, 9], [7, 8]], np.int32)
    scores = Scores(logprobs, tops, np.array([[-0.5, -1.0], [-0.25, -1.5]], np.float32)).pack(0, 2, 2)
    chunk = adapter.chunk_of(TokenDelta([4, 5], FinishReason.LENGTH, scores), 2)
    assert (chunk["token_ids"], chunk["finish_reason"], chunk["log_probs"]) == ([4, 5], "length", [-0.5, -2.0])
    shown = [[(one["rank"], one["token_id"], one["logprob"]) for one in each] for each in chunk["top_logprobs"]]
    assert shown == [[(1, 4, -0.5), (2, 9, -1.0)], [(1, 7, -0.25), (2, 8, -1.5)]]
    assert adapter.chunk_of(TokenDelta([4]), None) == {"token_ids": [4], "index": 0}


async def test_a_stream_ends_with_its_usage_and_a_bad_request_says_so(adapter: Any) -> None:
    engine, config = await adapter.Engine.from_args(
        ["--namespace", "space", "seal_key=one secret", "model=hiserve-nano"]
    )
    assert (config.namespace, config.served_model_name, config.discovery_backend) == ("space", "hiserve-nano", "file")
    (source,) = await engine.kv_event_sources()
    assert source.endpoint.startswith("ipc:///")
    engine._vocab_size = 9
    engine._client = client = FakeEngineClient(script=lambda _: [[5], [6, 7]], finish=FinishReason.LENGTH, cached=2)
    request = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 3}}
    chunks = [chunk async for chunk in engine.generate(request, Context())]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [5, 6, 7]
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert chunks[-1]["completion_usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 2}}
    (seen,) = client.seen
    other, _ = await adapter.Engine.from_args(["seal_key=one secret"])
    assert seen.sampling.seed == other._seeds.draw("one", 0), "each worker draws alike for one request"
    assert (seen.tag, seen.prompt.tolist()) == ("one", [1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="one choice"):
        await anext(engine.generate(request | {"sampling_options": {"n": 2}}, Context()))
    await engine.abort(Context())
    for each in (engine, other):
        await each.cleanup()
        await each.cleanup()
    assert client.stopped == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [1, 9]},
        {"token_ids": [-1]},
        {"token_ids": [2**40]},
        {"sampling_options": {"logit_bias": {"9": 1.0}}},
        {"stop_conditions": {"stop_token_ids": [9]}},
    ],
)
async def test_tokens_that_the_model_lacks_are_refused(adapter: Any, fields: dict[str, Any]) -> None:
    """They would end the worker, and then each to which the request is moved."""
    engine = adapter.Engine(make_options(seal_key="one secret", disable_prefix_cache=True))
    engine._vocab_size, engine._client = 9, FakeEngineClient(script=lambda _: [[5]])
    with pytest.raises(InvalidArgumentError, match="token ids"):
        await anext(engine.generate({"token_ids": [1, 8]} | fields, Context()))
    assert not engine._client.seen


async def test_a_worker_of_dynamo_is_one_worker(adapter: Any) -> None:
    with pytest.raises(ConfigError, match="one process for each"):
        await adapter.Engine.from_args(["replicas=2"])
