"""What is sent to find out about a cache: conversations in groups, a trace, recorded sessions, shared prefixes."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import msgspec

from hiserve.bench.datasets.recorded import (
    TRACE_BLOCK_TOKENS,
    AgentRecord,
    conversation_trace,
    read_rows,
    required,
    shortened,
)
from hiserve.bench.datasets.synthetic import check_fits, conversations, shared_prefixes
from hiserve.bench.options import CacheLoadOptions, chosen
from hiserve.bench.target import Encoder, Target
from hiserve.bench.workload import Turn, Workload
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """A workload, and the token ids of every prompt in it that is a text."""

    workload: Workload
    encoded: dict[str, Int32Array] = {}


async def build(
    load: CacheLoadOptions, target: Target, make_encoder: Callable[[], Awaitable[Encoder]], seed: int
) -> Requests:
    """Returns the requests of a load; what does not fit the context is refused, cut or left out. Raises HiserveError."""
    if load.load == "agent-sessions":
        rows, num_empty = read_rows(required(load.path, f"--load {load.load}"), load.num_prompts)
        return await _agents(load, rows, num_empty, target.max_model_len, await make_encoder())
    vocab_size = target.require_vocab_size()
    if load.load == "conversation-trace":
        block_tokens = max(1, round(TRACE_BLOCK_TOKENS * load.length_scale))
        workload = conversation_trace(
            required(load.path, f"--load {load.load}"),
            speed=load.speed,
            block_tokens=block_tokens,
            num_prompts=load.num_prompts,
            max_model_len=target.max_model_len,
            vocab_size=vocab_size,
            seed=seed,
        )
        return Requests(workload=_with_replies(workload, load))
    made = _conversations(load, vocab_size, seed) if load.load == "multi-turn" else _shared(load, vocab_size, seed)
    check_fits(made, target.max_model_len)
    return Requests(workload=made)


def _conversations(load: CacheLoadOptions, vocab_size: int, seed: int) -> Workload:
    lengths = [load.conversation_length, *[load.request_length] * (load.num_rounds - 1)]
    sessions = conversations(
        count=load.num_conversations,
        lengths=[_scaled(load, length) for length in lengths],
        output_length=chosen(load.output_length),
        vocab_size=vocab_size,
        seed=seed,
    )
    return Workload(name="multi-turn", sessions=sessions)


def _shared(load: CacheLoadOptions, vocab_size: int, seed: int) -> Workload:
    return shared_prefixes(
        num_groups=load.num_prefixes,
        prompts_per_group=load.suffixes_per_prefix,
        system_length=_scaled(load, load.prefix_length),
        question_length=_scaled(load, load.suffix_length),
        output_length=chosen(load.output_length),
        num_prompts=load.num_prompts,
        vocab_size=vocab_size,
        seed=seed,
    )


async def _agents(
    load: CacheLoadOptions, rows: list[AgentRecord], num_empty: int, max_model_len: int | None, encoder: Encoder
) -> Requests:
    """Returns one session for each agent, its prompts as they were; it ends before the first that does not fit.

    To cut a prompt's front would change what every later page holds, and so measure the cut.
    """
    room = math.inf if max_model_len is None else max_model_len
    sessions: dict[str, list[Turn]] = {}
    encoded: dict[str, Int32Array] = {}
    ended: set[str] = set()
    notes = {"empty_prompts_left_out": num_empty, "too_long_prompts_left_out": 0}
    for row in rows:
        prompt, reply = shortened(row.input, load.length_scale), shortened(row.output, load.length_scale)
        if row.session_id not in ended:
            ids = await encoder.encode(prompt)
            max_tokens = load.output_length or max(1, (await encoder.encode(reply)).size)
            if ids.size + max_tokens > room:
                ended.add(row.session_id)
        if row.session_id in ended:
            notes["too_long_prompts_left_out"] += 1
            continue
        encoded[prompt] = ids
        at_s = (row.timestamp_us - rows[0].timestamp_us) / 1e6 / load.speed
        sessions.setdefault(row.session_id, []).append(Turn(prompt=prompt, max_tokens=max_tokens, at_s=at_s))
    if not sessions:
        raise ConfigError(
            f"no session's first prompt and reply fit the model's context of {max_model_len} tokens. Give a smaller "
            "--length-scale.",
            param="length_scale",
        )
    return Requests(
        workload=Workload(name="agent-sessions", sessions=list(sessions.values()), notes=notes), encoded=encoded
    )


def _with_replies(workload: Workload, load: CacheLoadOptions) -> Workload:
    """Returns the workload with replies cut to the given length, if there is one."""
    if load.output_length is None:
        return workload
    sessions = [
        [msgspec.structs.replace(turn, max_tokens=min(turn.max_tokens, load.output_length)) for turn in turns]
        for turns in workload.sessions
    ]
    return msgspec.structs.replace(workload, sessions=sessions)


def _scaled(load: CacheLoadOptions, length: int) -> int:
    return max(1, round(length * load.length_scale))
