"""Settings: every field explains itself, wrong values are refused by name, and configurations travel."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import pytest

from hiserve.config.flags import Flag, flag_of, nearest
from hiserve.config.options import Options, by_group, flags, flat, make_options, without_secrets
from hiserve.config.settings import Settings
from hiserve.errors import ConfigError
from tests.helpers.settings import settings_of

ALL = list(flags().values())
NUMBERS = [setting for setting in ALL if setting.kind in ("int", "float")]
WHOLE = [setting for setting in ALL if setting.kind == "int"]
FLAGS = """
    --host --port --served-model-name --dtype --max-model-len --kv-pages --kv-dtype --window-pages --page-size --max-running-requests
    --max-batched-tokens --overlap --policy --replicas --tp --devices --exchange --cpu-threads --load-format --device --log-level --debug
    --revision --chat-template --reply-format --thoughts --sampling-defaults --max-queued-requests --max-queued-tokens --queue-timeout-s
    --request-timeout-s --step-timeout-s --api-key --admin-api-key --metrics-key --seal-key --responses-store --keep-volatile --share-prefixes --max-request-bytes --strict-fields --otel-endpoint
    --kv-events --kv-events-replay
    --drain-timeout-s --metrics-compat --kv-canary --disable-prefix-cache --host-cache-gib --shape
    --host-cache-name --host-admission --cache-verify --eviction
    --attention-backend --exact --graphs --graph-gate --graph-max-len --grammar-threads --spec --spec-steps --spec-tree --spec-history
    --store --store-gib --store-prefetch --store-prefetch-timeout-s --store-secret-file --store-timeout-s --tail-share --tail-every --state-dtype --quantize
"""
MAX_FLAGS, MAX_SHOWN = 75, 53


def value_of(config: Options, setting: Flag) -> Any:
    return getattr(getattr(config, setting.section), setting.name)


def ids(setting: Flag) -> str:
    return setting.name


def test_the_settings_are_the_flags_that_were_asked_for() -> None:
    assert {flag_of(name) for name in flags()} == {*FLAGS.split(), "--model"}
    assert len(flags()) <= MAX_FLAGS
    assert flags() is flags(), "made once"


@pytest.mark.parametrize("setting", ALL, ids=ids)
def test_every_field_has_a_default_of_its_type_and_a_sentence(setting: Flag) -> None:
    assert setting.help.endswith(".")
    assert setting.help[0].isalpha()
    assert value_of(make_options(), setting) == setting.default
    if setting.default is not None:
        assert value_of(make_options(**{setting.name: setting.default}), setting) == setting.default


@pytest.mark.parametrize("setting", NUMBERS, ids=ids)
def test_every_number_has_a_unit_unless_its_sentence_says_what_it_is_and_both_ends_of_its_range(
    setting: Flag,
) -> None:
    assert setting.unit or setting.name == "port"
    assert setting.least is not None
    assert setting.most is not None


@pytest.mark.parametrize("setting", NUMBERS, ids=ids)
def test_a_number_is_taken_within_its_range_as_text_too(setting: Flag) -> None:
    for end, beyond in ((setting.least, -1), (setting.most, 1)):
        assert end is not None
        assert value_of(make_options(**{setting.name: end}), setting) == end
        assert value_of(make_options(**{setting.name: str(end)}), setting) == end
        with pytest.raises(ConfigError, match=rf"{flag_of(setting.name)} is {end + beyond}; the (least|most) is {end}"):
            make_options(**{setting.name: end + beyond})


@pytest.mark.parametrize("setting", WHOLE, ids=ids)
@pytest.mark.parametrize("value", ["many", "", "1.5", 1.5, 2.0, True, None, [1], "0x10", float("nan")])
def test_what_is_no_whole_number_is_refused(setting: Flag, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{flag_of(setting.name)} is .*; give a whole number") as refused:
        make_options(**{setting.name: value})
    assert refused.value.param == setting.name
    assert all(word in refused.value.message for word in setting.choices)


@pytest.mark.parametrize("value", ["many", "", True, None, [1], float("nan"), "nan"])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"--queue-timeout-s is .*; give a number"):
        make_options(queue_timeout_s=value)
    assert make_options(queue_timeout_s="0.5").scheduler.queue_timeout_s == 0.5
    assert make_options(queue_timeout_s=2).scheduler.queue_timeout_s == 2.0


def test_a_list_takes_one_text_or_several_and_no_empty_one() -> None:
    assert make_options(api_key="a").server.api_key == ("a",)
    assert make_options(api_key=["a", "b"]).server.api_key == ("a", "b")
    for value in ("", ["a", ""]):
        with pytest.raises(ConfigError, match="--api-key is empty or no text; give texts"):
            make_options(api_key=value)


def test_no_secret_is_left_in_what_may_be_shown() -> None:
    config = make_options(api_key=["k1", "k2"], admin_api_key="k3", metrics_key="k4", seal_key="k5", port=1)
    shown = without_secrets(config)
    assert shown == make_options(port=1)
    secrets = {setting.name for setting in ALL if setting.is_secret}
    assert secrets == {"api_key", "admin_api_key", "metrics_key", "seal_key"}


@pytest.mark.parametrize("setting", [each for each in ALL if each.kind not in ("int", "float")], ids=ids)
def test_what_is_no_text_or_none_of_the_words_is_refused(setting: Flag) -> None:
    for value in (3, b"x", *(["none-of-these"] if setting.choices or setting.kind == "bool" else [])):
        with pytest.raises(ConfigError, match=f"{flag_of(setting.name)} is ") as refused:
            make_options(**{setting.name: value})
        assert all(word in refused.value.message for word in setting.choices)


@pytest.mark.parametrize("setting", [each for each in ALL if each.choices], ids=ids)
def test_every_word_is_taken(setting: Flag) -> None:
    for word in setting.choices:
        assert value_of(make_options(**{setting.name: word}), setting) == word


def test_only_what_is_none_by_default_may_be_none() -> None:
    assert make_options(served_model_name=None).server.served_model_name is None
    for setting in ALL:
        if setting.default is not None:
            with pytest.raises(ConfigError):
                make_options(**{setting.name: None})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kv_page", "--kv-pages"),
        ("pagesize", "--page-size"),
        ("max-model-length", "--max-model-len"),
        ("prot", "--port"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'. Did you mean {meant}?"):
        make_options(**{name: 1})


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert nearest("zzz", flags()) == ""
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'\.$"):
        make_options(zzz=1)


def test_dashes_are_underscores() -> None:
    assert make_options(**{"page-size": 4}) == make_options(page_size=4)


def test_a_configuration_travels_unchanged() -> None:
    config = make_options(model="m", kv_pages=7, overlap=0, policy="longest-prefix", debug=True, served_model_name="n")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Options) == config


def test_settings_have_a_field_for_every_option_and_do_not_travel_with_a_number_that_is_auto() -> None:
    settings = settings_of(page_size=4)
    assert flat(settings).keys() == flags().keys()
    wire = msgspec.msgpack.encode(settings)
    assert msgspec.msgpack.decode(wire, type=Settings) == settings
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(make_options()), type=Settings)


def test_what_is_for_debugging_works_and_is_not_shown() -> None:
    hidden = {flag.name for flag in ALL if flag.is_debug}
    assert len(ALL) - len(hidden) <= MAX_SHOWN
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("all")
    for flag in by_group():
        flag.add_to(group)
    words = parser.format_help().split()
    assert {flag.name for flag in ALL if flag_of(flag.name) not in words} == hidden
    assert parser.parse_args(["--kv-canary", "--eviction", "priority"]).eviction == "priority"
    assert [flag.group for flag in by_group()][-len(hidden) :] == ["debug"] * len(hidden)
