"""Every setting, in frozen sections; ``core.resolve`` turns each ``auto`` into a value, once.

A field's description is its ``--help`` text and its name is its flag (``page_size`` is
``--page-size``). A class takes its section or plain values, never the whole ``Config``.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hiserve.errors import ConfigError

Auto = Literal["auto"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_INT32 = 2**31 - 1  # pages, rows and lengths travel as int32


def about(
    text: str,
    *,
    unit: str | None = None,
    least: int | None = None,
    most: int | None = None,
    is_secret: bool = False,
) -> Meta:
    """Describes a setting: its help sentence, its unit, its range, and whether its value may be shown."""
    extra = {"unit": unit, "least": least, "most": most, "is_secret": is_secret}
    return Meta(description=text, extra_json_schema=extra)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is loaded."""

    model: Annotated[
        str,
        about("Checkpoint folder in Hugging Face layout, a hub id (owner/name), or hiserve-nano, the embedded model."),
    ] = "hiserve-nano"
    revision: Annotated[str | None, about("Branch, tag or commit of a hub model; the default is main.")] = None
    dtype: Annotated[
        DType,
        about("Type of weights and KV cache; auto is the checkpoint's, and float32 on CPU. float64 is for tests."),
    ] = "auto"
    max_model_len: Annotated[
        int | Auto,
        about(
            "Longest prompt plus output; auto is the model's context, or what the KV pool holds if that is less.",
            unit="tokens",
            least=2,
            most=MAX_INT32,
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], about("auto reads the weights; dummy draws random ones of the configured shape.")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], about("Where the model runs; auto is cuda if a device is there.")
    ] = "auto"
    chat_template: Annotated[
        str | None, about("File with a Jinja chat template that takes the place of the model's own.")
    ] = None
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        about("Sampling where a request is silent: as generation_config.json says, or temperature 1 and no filter."),
    ] = "model"


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The paged prefix cache."""

    kv_pages: Annotated[
        int | Auto,
        about(
            "Size of the device KV pool, the padding page included; auto takes a share of free memory.",
            unit="pages",
            least=2,
            most=MAX_INT32,
        ),
    ] = "auto"
    page_size: Annotated[
        int, about("Tokens per page; prefixes are shared in whole pages.", unit="tokens", least=1, most=MAX_INT32)
    ] = 16
    disable_prefix_cache: Annotated[
        bool,
        about("Reuse nothing between requests: each has a prefix cache of its own (to measure what sharing brings)."),
    ] = False


class Scheduler(msgspec.Struct, frozen=True, kw_only=True):
    """Admission and batching."""

    max_running_requests: Annotated[
        int | Auto,
        about(
            "Requests a worker runs at once; auto is 32 on cpu and 256 on cuda.",
            unit="requests",
            least=1,
            most=MAX_INT32,
        ),
    ] = "auto"
    max_batched_tokens: Annotated[
        int | Auto,
        about(
            "Tokens computed per step, prefill chunks and decodes together; auto is 512 on cpu and 2048 on cuda.",
            unit="tokens",
            least=1,
            most=MAX_INT32,
        ),
    ] = "auto"
    policy: Annotated[
        Literal["fcfs", "longest-prefix", "priority"],
        about("Who is admitted next: first come, the longest cached prefix, or the largest priority of a request."),
    ] = "fcfs"
    max_queued_requests: Annotated[
        int,
        about(
            "Requests that may wait for a worker; more are refused with 429.", unit="requests", least=1, most=MAX_INT32
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        about(
            "Prompt tokens that may wait for a worker; more are refused with 429.",
            unit="tokens",
            least=1,
            most=MAX_INT32,
        ),
    ] = 8_000_000
    queue_timeout_s: Annotated[
        float,
        about(
            "Longest a request may wait for a worker, then it ends with 503; 0 is no limit.",
            unit="s",
            least=0,
            most=86_400,
        ),
    ] = 0.0
    request_timeout_s: Annotated[
        float,
        about(
            "Longest a request may take in all, then it ends with what it has and finish_reason abort; 0 is no limit.",
            unit="s",
            least=0,
            most=86_400,
        ),
    ] = 0.0


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    """How steps are executed."""

    overlap: Annotated[
        int | Auto,
        about(
            "Steps planned ahead of the running one, 0 or 1; auto is 1 on cuda and 0 on cpu.",
            unit="steps",
            least=0,
            most=1,
        ),
    ] = "auto"
    cpu_threads: Annotated[
        int | Auto,
        about(
            "Threads a worker computes with on cpu; auto is the cores less one, shared among replicas.",
            unit="threads",
            least=1,
            most=1024,
        ),
    ] = "auto"


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers."""

    replicas: Annotated[
        int,
        about(
            "Workers under one scheduler, each with a copy of the model and its own cache.",
            unit="workers",
            least=1,
            most=1024,
        ),
    ] = 1


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP surface and logging."""

    host: Annotated[str, about("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, about("TCP port to listen on; 0 picks a free one.", least=0, most=65_535)] = 8000
    served_model_name: Annotated[
        str | None, about("Name clients use for the model; the default is the folder's name.")
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        about("Key that requests must carry; may be given several times, for as many tenants.", is_secret=True),
    ] = ()
    admin_api_key: Annotated[
        str | None,
        about("Key for what affects all tenants: flushing, aborting all, server information.", is_secret=True),
    ] = None
    share_prefixes: Annotated[
        bool, about("Let all API keys share cached prefixes; each has a cache of its own otherwise.")
    ] = False
    max_request_bytes: Annotated[
        int,
        about("Largest body of a request; larger ones are refused with 413.", unit="bytes", least=1, most=MAX_INT32),
    ] = 32 * 2**20
    strict_fields: Annotated[
        bool, about("Refuse request fields that hiserve does not know, which it ignores otherwise.")
    ] = False
    drain_timeout_s: Annotated[
        float,
        about("Time that open requests get to finish when the server is told to stop.", unit="s", least=0, most=86_400),
    ] = 30.0
    metrics_compat: Annotated[
        Literal["none", "vllm", "sglang"], about("Show metrics under another engine's names too.")
    ] = "none"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about("Least severe messages to log.")] = "info"
    debug: Annotated[bool, about("Show tracebacks for errors that are normally one line.")] = False


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Travels to every process as the first message."""

    model: Model = Model()
    cache: Cache = Cache()
    scheduler: Scheduler = Scheduler()
    runner: Runner = Runner()
    parallel: Parallel = Parallel()
    server: Server = Server()


Kind = Literal["int", "float", "str", "bool", "list"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one section, as the command line and the documentation need it.

    Attributes:
        section: Field name of the section in ``Config``.
        name: Field name; the flag is ``--name`` with dashes.
        kind: ``int``, ``float``, ``str``, ``bool``, or ``list`` of texts.
        choices: Allowed words; for an ``int`` setting, words allowed beside numbers.
        default: Default value.
        help: One sentence.
        unit: Unit of a number, or None.
        least: Smallest allowed number, or None.
        most: Largest allowed number, or None.
        is_secret: Its value must not be shown.
    """

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    help: str
    unit: str | None
    least: int | None
    most: int | None
    is_secret: bool


def settings() -> dict[str, Setting]:
    """Returns every setting by name, in the order of the sections."""
    found = {}
    for section in msgspec.structs.fields(Config):
        section_type = type(section.default)
        hints = get_type_hints(section_type, include_extras=True)
        for field in msgspec.structs.fields(section_type):
            kind, choices = _kind_and_choices(get_args(hints[field.name])[0])
            meta = next(part for part in get_args(hints[field.name])[1:] if isinstance(part, Meta))
            extra = meta.extra_json_schema or {}
            found[field.name] = Setting(
                section=section.name,
                name=field.name,
                kind=kind,
                choices=choices,
                default=field.default,
                help=meta.description or "",
                unit=extra.get("unit"),
                least=extra.get("least"),
                most=extra.get("most"),
                is_secret=bool(extra.get("is_secret")),
            )
    return found


def _kind_and_choices(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    if get_origin(annotation) is tuple:
        return "list", ()
    members = get_args(annotation) or (annotation,)
    words = [word for member in members for word in (get_args(member) or (member,)) if isinstance(word, str)]
    plain: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
    return next((kind for form, kind in plain.items() if form in members), "str"), tuple(words)


def make_config(**values: Any) -> Config:
    """Builds a configuration from flat names, as flags and ``LLM(...)`` give them.

    Numbers may be given as text. Names with dashes are accepted.

    Raises:
        ConfigError: An unknown name (the nearest known one is suggested), or a value of the wrong type or out of range.
    """
    known = settings()
    sections: dict[str, dict[str, Any]] = {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in known:
            raise ConfigError(f"unknown setting {given!r}.{nearest(name, known)}", param=given)
        sections.setdefault(known[name].section, {})[name] = _checked(known[name], value)
    return Config(
        **{
            section.name: type(section.default)(**sections.get(section.name, {}))
            for section in msgspec.structs.fields(Config)
        }
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that suggests the nearest known setting, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {flag_of(close[0])}?" if close else ""


def flag_of(name: str) -> str:
    """Returns the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _checked(setting: Setting, value: Any) -> Any:
    """Returns the value if the setting takes it; a number in text becomes a number."""
    is_optional = setting.default is None
    if (value is None and is_optional) or (isinstance(value, str) and value in setting.choices):
        return value
    if setting.kind in ("int", "float"):
        return _number(setting, value)
    if setting.kind == "list":
        return _texts(setting, value)
    is_right = isinstance(value, bool if setting.kind == "bool" else str) and not setting.choices
    if not is_right:
        wanted = f"one of {', '.join(setting.choices)}" if setting.choices else f"a {setting.kind}"
        raise ConfigError(f"{flag_of(setting.name)} is {value!r}; give {wanted}.", param=setting.name)
    return value


def _number(setting: Setting, value: Any) -> int | float:
    flag = flag_of(setting.name)
    is_whole = setting.kind == "int"
    number: int | float | None = None
    with suppress(TypeError, ValueError):
        if isinstance(value, str) or not is_whole:
            number = int(value) if is_whole else float(value)
        else:
            number = operator.index(value)
    if number is None or isinstance(value, bool) or math.isnan(number):
        words = f" or {', '.join(setting.choices)}" if setting.choices else ""
        raise ConfigError(f"{flag} is {value!r}; give a {'whole ' * is_whole}number{words}.", param=setting.name)
    if setting.least is not None and number < setting.least:
        raise ConfigError(f"{flag} is {number:.12g}; the least is {setting.least}.", param=setting.name)
    if setting.most is not None and number > setting.most:
        raise ConfigError(f"{flag} is {number:.12g}; the most is {setting.most}.", param=setting.name)
    return number


def _texts(setting: Setting, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    is_right = isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts)
    if not is_right:
        shown = "given" if setting.is_secret else repr(value)
        raise ConfigError(f"{flag_of(setting.name)} is {shown}; give texts that are not empty.", param=setting.name)
    return tuple(texts)


def flat(config: Config) -> dict[str, Any]:
    """Returns every setting by its flat name, as ``make_config`` takes them."""
    return {name: getattr(getattr(config, setting.section), name) for name, setting in settings().items()}


def without_secrets(config: Config) -> Config:
    """Returns the configuration as it may be shown, and as processes that need no secrets get it."""
    hidden: dict[str, dict[str, Any]] = {}
    for setting in settings().values():
        if setting.is_secret:
            hidden.setdefault(setting.section, {})[setting.name] = setting.default
    sections = {name: msgspec.structs.replace(getattr(config, name), **defaults) for name, defaults in hidden.items()}
    return msgspec.structs.replace(config, **sections)


def known(value: int | Auto) -> int:
    """Returns a resolved number; ``auto`` here means that ``resolve`` was not called."""
    assert isinstance(value, int), "an 'auto' setting reached a consumer; call resolve() first"
    return value
