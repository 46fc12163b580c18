"""Sizes that the user left open fit the served model; what was given stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hiserve.bench.options import (
    FITTING,
    SIZES,
    CacheLoadOptions,
    DataOptions,
    MultiturnOptions,
    OfflineOptions,
    chosen,
    filled,
)

SECTIONS = [
    DataOptions(),
    DataOptions(dataset="shared-prefix"),
    MultiturnOptions(),
    OfflineOptions(),
    CacheLoadOptions(),
    CacheLoadOptions(load="shared-prefix"),
]


def longest(options: Any) -> float:
    """Tokens of the longest request, prompt and reply."""
    if isinstance(options, MultiturnOptions):
        return options.num_rounds * (options.request_length + options.output_length)
    if isinstance(options, CacheLoadOptions):
        scale, output = options.length_scale, chosen(options.output_length)
        if options.load == "multi-turn":
            prompts = options.conversation_length + (options.num_rounds - 1) * options.request_length
            return prompts * scale + options.num_rounds * output
        return (options.prefix_length + options.suffix_length) * scale + output
    if isinstance(options, DataOptions) and options.dataset == "shared-prefix":
        return options.system_length + options.question_length + chosen(options.output_length)
    ends = [
        np.ceil((1 + options.random_range_ratio) * length) for length in (options.input_length, options.output_length)
    ]
    return float(sum(ends))


@pytest.mark.parametrize("options", SECTIONS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda", None])
@pytest.mark.parametrize("max_model_len", [64, 1000, 8192, None])
def test_every_size_is_there_and_the_longest_request_fits(
    options: Any, device: str | None, max_model_len: int | None
) -> None:
    found = filled(options, device=device, max_model_len=max_model_len)
    sizes = {name: getattr(found, name) for name in SIZES[type(options)]}
    if getattr(options, "dataset", None) == "shared-prefix":
        assert sizes.pop("num_prompts") is None, "all there are"
    assert all(size >= 1 for size in sizes.values()), sizes
    assert max_model_len is None or longest(found) <= max_model_len
    assert filled(found, device="cuda", max_model_len=1) == found, "nothing is open any more"


def test_a_cpu_gets_small_sizes_and_what_does_not_tell_gets_those_of_an_accelerator() -> None:
    on_cpu, elsewhere, unknown = (
        filled(DataOptions(), device=device, max_model_len=8192) for device in ("cpu", "cuda", None)
    )
    assert elsewhere == unknown
    assert (elsewhere.num_prompts, on_cpu.num_prompts) == SIZES[DataOptions]["num_prompts"] == (1000, 64)
    assert (elsewhere.input_length, elsewhere.output_length) == (1024, 1024)


def test_what_was_given_stays_and_the_rest_makes_room() -> None:
    found = filled(DataOptions(input_length=900), device="cuda", max_model_len=1000)
    assert (found.input_length, found.output_length) == (900, 100)
    too_long = filled(DataOptions(input_length=2000), device="cuda", max_model_len=1000)
    assert (too_long.input_length, too_long.output_length) == (2000, 1), "it is refused later, with a reason"
    varied = filled(DataOptions(random_range_ratio=0.3), device="cuda", max_model_len=1200)
    assert 1190 <= longest(varied) <= 1200, "lengths are drawn from a range, whose end is rounded up"


def test_a_recording_says_itself_how_much_is_sent() -> None:
    for options in (
        DataOptions(dataset="chats"),
        DataOptions(dataset="conversation-trace"),
        CacheLoadOptions(load="agent-sessions"),
    ):
        assert filled(options, device="cpu", max_model_len=100) == options
    with pytest.raises(AssertionError):
        chosen(FITTING)
