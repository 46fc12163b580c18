"""Flags are the fields of the sections: every one parses, and wrong values are refused."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve.bench.options import (
    FITTING,
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
