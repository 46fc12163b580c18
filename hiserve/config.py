"""Every setting, in frozen sections; ``resolve`` turns each ``auto`` into a value, once.

A field's description is its ``--help`` text and its name is its flag (``page_size`` is
``--page-size``). A class takes its section or plain values, never the whole ``Config``.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from hiserve.errors import ConfigError, ResourceError

Auto = Literal["auto"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
GIB = 2**30
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def about(text: str, *, unit: str | None = None, least: int | None = None, most: int | None = None) -> Meta:
    """Describes a setting: its help sentence, its unit and its range."""
    return Meta(description=text, extra_json_schema={"unit": unit, "least": least, "most": most})


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is loaded."""

    model: Annotated[str, about("Checkpoint folder in Hugging Face layout, or hiserve-nano, the embedded model.")] = (
        "hiserve-nano"
    )
    dtype: Annotated[
        DType,
        about("Type of weights and KV cache; auto is the checkpoint's, and float32 on CPU. float64 is for tests."),
    ] = "auto"
    max_model_len: Annotated[
        int | Auto, about("Longest prompt plus output; auto is the model's context.", unit="tokens", least=2)
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], about("auto reads the weights; dummy draws random ones of the configured shape.")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], about("Where the model runs; auto is cuda if a device is there.")
    ] = "auto"


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The paged prefix cache."""

    kv_pages: Annotated[
        int | Auto,
        about(
            "Size of the device KV pool, the padding page included; auto takes a share of free memory.",
            unit="pages",
            least=2,
        ),
    ] = "auto"
    page_size: Annotated[int, about("Tokens per page; prefixes are shared in whole pages.", unit="tokens", least=1)] = (
        16
    )


class Scheduler(msgspec.Struct, frozen=True, kw_only=True):
    """Admission and batching."""

    max_running_requests: Annotated[
        int | Auto,
        about("Requests a worker runs at once; auto is 32 on cpu and 256 on cuda.", unit="requests", least=1),
    ] = "auto"
    max_batched_tokens: Annotated[
        int | Auto,
        about(
            "Tokens computed per step, prefill chunks and decodes together; auto is 512 on cpu and 2048 on cuda.",
            unit="tokens",
            least=1,
        ),
    ] = "auto"
    policy: Annotated[
        Literal["fcfs", "longest-prefix"], about("Who is admitted next: first come, or the longest cached prefix.")
    ] = "fcfs"


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
        ),
    ] = "auto"


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers."""

    replicas: Annotated[
        int,
        about("Workers under one scheduler, each with a copy of the model and its own cache.", unit="workers", least=1),
    ] = 1


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP surface and logging."""

    host: Annotated[str, about("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, about("TCP port to listen on; 0 picks a free one.", least=0)] = 8000
    served_model_name: Annotated[
        str | None, about("Name clients use for the model; the default is the folder's name.")
    ] = None
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


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one section, as the command line and the documentation need it.

    Attributes:
        section: Field name of the section in ``Config``.
        name: Field name; the flag is ``--name`` with dashes.
        kind: ``int``, ``str`` or ``bool``.
        choices: Allowed words; for an ``int`` setting, words allowed beside numbers.
        default: Default value.
        help: One sentence.
        unit: Unit of a number, or None.
        least: Smallest allowed number, or None.
        most: Largest allowed number, or None.
    """

    section: str
    name: str
    kind: Literal["int", "str", "bool"]
    choices: tuple[str, ...]
    default: Any
    help: str
    unit: str | None
    least: int | None
    most: int | None


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
            )
    return found


def _kind_and_choices(annotation: Any) -> tuple[Literal["int", "str", "bool"], tuple[str, ...]]:
    members = get_args(annotation) or (annotation,)
    if annotation is bool:
        return "bool", ()
    words = [word for member in members for word in (get_args(member) or (member,)) if isinstance(word, str)]
    return ("int" if int in members else "str"), tuple(words)


def make_config(**values: Any) -> Config:
    """Builds a configuration from flat names, as flags and ``LLM(...)`` give them.

    Numbers may be given as text. Names with dashes are accepted.

    Raises:
        ConfigError: An unknown name (the nearest known one is suggested) or a value out of range.
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


def nearest(name: str, known: dict[str, Setting]) -> str:
    """Returns a sentence that suggests the nearest known setting, or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean --{close[0].replace('_', '-')}?" if close else ""


def _checked(setting: Setting, value: Any) -> Any:
    flag = f"--{setting.name.replace('_', '-')}"
    if setting.kind == "bool" or value is None:
        return value
    if setting.kind == "str":
        text = str(value)
        if setting.choices and text not in setting.choices:
            raise ConfigError(f"{flag} is {text!r}; choose one of {', '.join(setting.choices)}.", param=setting.name)
        return text
    if isinstance(value, str) and value in setting.choices:
        return value
    try:
        number = int(value)
    except (TypeError, ValueError):
        words = f" or {', '.join(setting.choices)}" if setting.choices else ""
        raise ConfigError(f"{flag} is {value!r}; give a whole number{words}.", param=setting.name) from None
    if setting.least is not None and number < setting.least:
        raise ConfigError(f"{flag} is {number}; the least is {setting.least}.", param=setting.name)
    if setting.most is not None and number > setting.most:
        raise ConfigError(f"{flag} is {number}; the most is {setting.most}.", param=setting.name)
    return number


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resolve`` must know of a model.

    Attributes:
        context_length: Tokens the model was made for.
        checkpoint_dtype: Type name of the stored weights.
        num_params: Parameters.
        slot_elements: KV elements per token, all layers together.
        vocab_size: Tokens in the vocabulary.
    """

    context_length: int
    checkpoint_dtype: str
    num_params: int
    slot_elements: int
    vocab_size: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What ``resolve`` must know of the machine.

    Attributes:
        cores: CPU cores this process may use.
        memory_bytes: Memory still available to it, control-group limits included.
        cuda_memory_bytes: Free memory of the first CUDA device; 0 when there is none.
    """

    cores: int
    memory_bytes: int
    cuda_memory_bytes: int


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration without ``auto``, and how it came about.

    Attributes:
        config: Every ``auto`` replaced.
        decisions: One line for each value that was chosen here.
        memory: Bytes per worker, item by item.
    """

    config: Config
    decisions: tuple[str, ...]
    memory: dict[str, int]


def known(value: int | Auto) -> int:
    """Returns a resolved number; ``auto`` here means that ``resolve`` was not called."""
    assert isinstance(value, int), "an 'auto' setting reached a consumer; call resolve() first"
    return value


def resolve(config: Config, model: ModelFacts, machine: Machine) -> Resolved:
    """Replaces every ``auto``. Pure: the same facts give the same answer.

    Raises:
        ConfigError: Settings contradict each other or the model.
        ResourceError: Weights or the smallest KV pool do not fit in memory.
    """
    device = config.model.device
    if device == "auto":
        device = "cuda" if machine.cuda_memory_bytes else "cpu"
    if device == "cuda" and not machine.cuda_memory_bytes:
        raise ConfigError("--device is cuda but no CUDA device was found. Use --device cpu.", param="device")
    on_cpu = device == "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else model.checkpoint_dtype  # type: ignore[assignment]
    replicas = config.parallel.replicas
    rows = _or(config.scheduler.max_running_requests, 32 if on_cpu else 256)
    tokens = _or(config.scheduler.max_batched_tokens, 512 if on_cpu else 2048)
    threads = _or(config.runner.cpu_threads, max(1, max(1, machine.cores - 1) // replicas))
    overlap = _or(config.runner.overlap, 0 if on_cpu else 1)
    length = _or(config.model.max_model_len, model.context_length)
    if length > model.context_length:
        raise ConfigError(
            f"--max-model-len is {length} but the model's context is {model.context_length} tokens. Lower it.",
            param="max_model_len",
        )
    weights = model.num_params * DTYPE_BYTES[dtype]
    page = config.cache.page_size * model.slot_elements * DTYPE_BYTES[dtype]
    free = machine.memory_bytes // replicas if on_cpu else machine.cuda_memory_bytes // replicas
    pages, length = _size_pool(config, length, rows, page=page, room=free - weights, on_cpu=on_cpu)
    resolved = Config(
        model=msgspec.structs.replace(config.model, device=device, dtype=dtype, max_model_len=length),
        cache=msgspec.structs.replace(config.cache, kv_pages=pages),
        scheduler=msgspec.structs.replace(config.scheduler, max_running_requests=rows, max_batched_tokens=tokens),
        runner=msgspec.structs.replace(config.runner, overlap=overlap, cpu_threads=threads),
        parallel=config.parallel,
        server=config.server,
    )
    memory = {"weights": weights, "KV pool": pages * page, "token and page tables": rows * length * 8}
    return Resolved(config=resolved, decisions=_decisions(config, resolved), memory=memory)


def _or(value: int | Auto, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _size_pool(config: Config, length: int, rows: int, *, page: int, room: int, on_cpu: bool) -> tuple[int, int]:
    """Returns (pages, longest request), shrinking whichever of the two was ``auto``."""
    page_size = config.cache.page_size
    if isinstance(config.cache.kv_pages, int):
        pages = config.cache.kv_pages
    else:
        share = min(room // 4, 2 * GIB) if on_cpu else int(room * 0.85)
        pages = min(share // page, 1 + rows * -(-length // page_size))
    if pages * page > room:
        raise ResourceError(
            f"{pages} KV pages need {pages * page / GIB:.2f} GiB but {max(0, room) / GIB:.2f} GiB are free beside "
            "the weights. Lower --kv-pages, --replicas or --page-size.",
            param="kv_pages",
        )
    longest = (pages - 1) * page_size
    if longest >= length:
        return pages, length
    if config.model.max_model_len == "auto" and longest >= 2:
        return pages, longest
    raise ConfigError(
        f"{pages} KV pages hold {max(0, longest)} tokens, fewer than the {length} of the longest request. "
        "Raise --kv-pages or lower --max-model-len.",
        param="kv_pages",
    )


def _decisions(given: Config, resolved: Config) -> tuple[str, ...]:
    lines = []
    for setting in settings().values():
        before = getattr(getattr(given, setting.section), setting.name)
        after = getattr(getattr(resolved, setting.section), setting.name)
        if before != after:
            lines.append(f"--{setting.name.replace('_', '-')} {before} -> {after}")
    return tuple(lines)
