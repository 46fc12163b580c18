"""Flags are the fields of the sections: every one parses, and wrong values are refused."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve.bench.options import (
    FITTING,
    SIZES,
    CacheLoadOptions,
    ConnectionOptions,
    DataOptions,
    GoodputOptions,
    LimitOptions,
    LoadOptions,
    MultiturnOptions,
    OfflineOptions,
    OutputOptions,
    PlotOptions,
    SweepOptions,
    add_flags,
    chosen,
    filled,
    pick,
)
from hiserve.config.flags import flag_of
from hiserve.config.options import flags
from hiserve.errors import ConfigError

SECTIONS = (
    ConnectionOptions,
    DataOptions,
    LoadOptions,
    LimitOptions,
    MultiturnOptions,
    OfflineOptions,
    SweepOptions,
    GoodputOptions,
    OutputOptions,
    PlotOptions,
)
SERVE = (ConnectionOptions, DataOptions, LoadOptions, LimitOptions, GoodputOptions, OutputOptions, PlotOptions)


def parse(*argv: str, sections: tuple[type[msgspec.Struct], ...] = SERVE) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, *sections)
    return vars(parser.parse_args(argv))


def test_nothing_given_is_the_default_of_every_section() -> None:
    given = parse()
    assert [pick(section, given) for section in SERVE] == [section() for section in SERVE]


def test_no_option_has_the_name_of_a_setting() -> None:
    """Such an option would end up in the engine's configuration."""
    names = {field.name for section in SECTIONS for field in msgspec.structs.fields(section)}
    assert not names & (set(flags()) | {"config", "command", "kind"})


@pytest.mark.parametrize(
    ("argv", "section", "name", "value"),
    [
        (["--url", "http://x"], ConnectionOptions, "url", "http://x"),
        (["--backend", "generate"], ConnectionOptions, "backend", "generate"),
        (["--ignore-eos"], ConnectionOptions, "ignore_eos", True),
        (["--no-ignore-eos"], ConnectionOptions, "ignore_eos", False),
        (["--tokenizer", "a/b"], ConnectionOptions, "tokenizer", Path("a/b")),
        (["--dataset", "chats"], DataOptions, "dataset", "chats"),
        (["--num-prompts", "7"], DataOptions, "num_prompts", 7),
        (["--speed", "inf"], DataOptions, "speed", math.inf),
        (["--random-range-ratio", "0.5"], DataOptions, "random_range_ratio", 0.5),
        (["--request-rate", "2.5"], LoadOptions, "request_rate", 2.5),
        (["--flush-cache"], LimitOptions, "flush_cache", True),
        (["--goodput", "ttft:1", "e2e:2"], GoodputOptions, "goodput", ("ttft:1", "e2e:2")),
        (["--batches", "1", "8"], SweepOptions, "batches", (1, 8)),
        (["--temperatures", "0.5"], SweepOptions, "temperatures", (0.5,)),
        (["--sources", "host", "cold"], SweepOptions, "sources", ("host", "cold")),
        (["--steps", "3", "auto"], SweepOptions, "steps", ("3", "auto")),
        (["--output", "r.json"], OutputOptions, "output", Path("r.json")),
    ],
)
def test_a_flag_becomes_a_value_of_its_type(argv: list[str], section: Any, name: str, value: Any) -> None:
    sections = (SweepOptions,) if section is SweepOptions else SERVE  # both have a data set
    assert getattr(pick(section, parse(*argv, sections=sections)), name) == value


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--num-prompts", "0", "the least is 1"),
        ("--num-prompts", "1.5", "give a whole number"),
        ("--random-range-ratio", "1.1", "the most is 1"),
        ("--random-range-ratio", "-0.1", "the least is 0"),
        ("--request-rate", "0", "above 0"),
        ("--speed", "nan", "give a number"),
        ("--burstiness", "x", "give a number"),
        ("--dataset", "sharegpt", "give one of random, "),
        ("--backend", "vllm", "give one of openai, "),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(flag: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse(flag, value)
    assert flag in str(caught.value)


def test_help_shows_sentence_unit_and_default_of_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for section in SECTIONS:
        with pytest.raises(SystemExit):
            parse("--help", sections=(section,))
        text = "".join(capsys.readouterr().out.split())
        for field in msgspec.structs.fields(section):
            assert flag_of(field.name) in text
            is_open = type(field.default) is int and field.default == FITTING
            shown = not (field.default is None or field.default == () or field.default is False or is_open)
            default = "".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            assert (f"(default:{default})" in text) == shown or not shown, field.name


OPEN_SECTIONS = [
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


@pytest.mark.parametrize("options", OPEN_SECTIONS, ids=str)
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
