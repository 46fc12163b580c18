"""The offline API: a model, prompts in, texts out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from hiserve.config import Config, known, make_config
from hiserve.core.machine import probe
from hiserve.core.plan import Int32Array
from hiserve.core.request import MAX_SEED, FinishReason, SamplingParams
from hiserve.core.resolve import resolve
from hiserve.errors import ConfigError, ContextLengthError, EngineError, RequestError, UnavailableError
from hiserve.messages.types import Admit
from hiserve.models.config import find_model, read_model_config
from hiserve.scheduler.client import EngineClient
from hiserve.text.chat import check_text
from hiserve.text.tokenizer import Tokenizer
from hiserve.worker.build import build_engine
from hiserve.worker.loop import Engine

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


@dataclass(slots=True)
class CompletionOutput:
    """One generated text.

    Attributes:
        index: Choice index; 0.
        text: Decoded tokens, special tokens left out.
        token_ids: Generated tokens, an end token included.
        finish_reason: ``stop`` or ``length``.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and what followed it.

    Attributes:
        prompt: The text, or None when token ids were given.
        prompt_token_ids: Its tokens.
        num_cached_tokens: How many of them came from the prefix cache.
        outputs: The choices; one.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    outputs: list[CompletionOutput] = field(default_factory=list)


class _Backend(Protocol):
    """Runs a batch to its end."""

    def run(self, prompts: list[Int32Array], sampling: list[SamplingParams], outputs: list[RequestOutput]) -> None:
        """Fills in tokens, finish reason and cached tokens of each output."""

    def close(self) -> None:
        """Gives everything back."""


class LLM:
    """A model behind a simple call; a context manager.

    Args:
        model: Checkpoint folder, or ``hiserve-nano``.
        in_process: Plan and execute in this process, without scheduler and worker processes.
        **config: Any setting of ``hiserve.config``, for example ``page_size=16``.

    Raises:
        ConfigError, ModelError, ResourceError: As for ``hiserve serve``.
    """

    def __init__(self, model: str | Path = "hiserve-nano", *, in_process: bool = False, **config: Any) -> None:
        given = make_config(model=str(model), **config)
        if in_process and given.parallel.replicas > 1:
            raise ConfigError("in_process runs one engine; leave replicas at 1 or in_process off.", param="replicas")
        folder = find_model(str(model))
        model_config = read_model_config(folder)
        resolved = resolve(given, model_config.facts(), probe())
        for decision in resolved.decisions:
            logger.info(decision)
        self.config = resolved.config
        self.tokenizer = Tokenizer.load(folder, model_config.eos_token_ids)
        self._vocab_size = model_config.vocab_size
        self._is_closed = False
        self._backend: _Backend = _InProcess(self.config) if in_process else _Processes(self.config)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generates for every prompt; the order of the results is that of the prompts.

        Args:
            prompts: One or several texts or lists of token ids.
            sampling: For all, or one for each prompt; the default is ``SamplingParams()``.

        Raises:
            RequestError: A prompt is empty, has unknown token ids or does not fit the context.
            EngineError: The engine failed a request.
            UnavailableError: The engine was closed or has died.
        """
        if self._is_closed:
            raise UnavailableError("this LLM was closed; make a new one.")
        batch = _as_batch(prompts)
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise RequestError(f"{len(params)} sampling parameters for {len(batch)} prompts; give one, or one each.")
        tokens = [self._encode(prompt) for prompt in batch]
        outputs = [
            RequestOutput(prompt if isinstance(prompt, str) else None, ids.tolist(), outputs=[CompletionOutput()])
            for prompt, ids in zip(batch, tokens, strict=True)
        ]
        self._backend.run(tokens, params, outputs)
        for output in outputs:
            choice = output.outputs[0]
            choice.text = self.tokenizer.decode(choice.token_ids)
        return outputs

    def close(self) -> None:
        """Stops the processes, or frees the model; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._backend.close()

    def __enter__(self) -> LLM:
        """Starts a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine."""
        self.close()

    def _encode(self, prompt: Prompt) -> Int32Array:
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            if not all(_is_token(value, self._vocab_size) for value in prompt):
                raise RequestError(f"token ids must be integers from 0 to {self._vocab_size - 1}.", param="prompt")
            ids = np.array(prompt, dtype=np.int32)
        max_len = known(self.config.model.max_model_len)
        if not ids.size:
            raise RequestError("the prompt is empty; give at least one token.", param="prompt")
        if ids.size >= max_len:
            raise ContextLengthError(
                f"the prompt has {ids.size} tokens; with one to generate, {max_len} is the limit. Shorten it.",
                param="prompt",
            )
        return ids


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < vocab_size


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(part, Integral) for part in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


class _InProcess:
    """Steps an engine of this process, in a thread, so that Ctrl-C falls between two steps and never into one."""

    def __init__(self, config: Config) -> None:
        self.engine: Engine = build_engine(config)
        self._last_uid = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-llm")

    def run(self, prompts: list[Int32Array], sampling: list[SamplingParams], outputs: list[RequestOutput]) -> None:
        stop = threading.Event()
        try:
            self._thread.submit(self._run, prompts, sampling, outputs, stop).result()
        finally:
            stop.set()

    def _run(
        self,
        prompts: list[Int32Array],
        sampling: list[SamplingParams],
        outputs: list[RequestOutput],
        stop: threading.Event,
    ) -> None:
        waiting: dict[int, RequestOutput] = {}
        for tokens, params, output in zip(prompts, sampling, outputs, strict=True):
            self._last_uid += 1
            self.engine.add(Admit(self._last_uid, tokens.size, _seeded(params), b"", 0), tokens)
            waiting[self._last_uid] = output
        failure: EngineError | None = None
        while self.engine.has_work:
            if failure is not None or stop.is_set():
                self.engine.abort(list(waiting))
            report = self.engine.step()
            if report is None:
                continue
            for uid, _, message in report.failed:
                del waiting[uid]
                failure = failure or EngineError(f"request {uid} failed: {message}")
            at = 0
            for uid, count, finish, cached in zip(
                report.uids, report.counts, report.finishes, report.cached, strict=True
            ):
                output = waiting[uid] if not finish else waiting.pop(uid)
                _extend(output, report.tokens[at : at + count].tolist(), FinishReason(finish), cached)
                at += count
        if failure is not None:
            raise failure

    def close(self) -> None:
        self._thread.shutdown()
        self.engine.close()


class _Processes:
    """Talks to a scheduler process from an event loop in a thread."""

    def __init__(self, config: Config) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hiserve-llm", daemon=True)
        self._thread.start()
        with ExitStack() as undo:
            undo.callback(self._end_loop)
            self._client: EngineClient = self._wait(EngineClient.start(config))
            undo.pop_all()

    def run(self, prompts: list[Int32Array], sampling: list[SamplingParams], outputs: list[RequestOutput]) -> None:
        self._wait(self._run(prompts, sampling, outputs))

    async def _run(
        self, prompts: list[Int32Array], sampling: list[SamplingParams], outputs: list[RequestOutput]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for tokens, params, output in zip(prompts, sampling, outputs, strict=True):
                group.create_task(self._follow(tokens, params, output))

    async def _follow(self, tokens: Int32Array, params: SamplingParams, output: RequestOutput) -> None:
        async for delta in self._client.generate(tokens, params):
            _extend(output, delta.tokens, delta.finish, delta.cached)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            future.cancel()  # Ctrl-C while it waits: what was asked for is aborted

    def close(self) -> None:
        self._wait(self._client.stop())
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _seeded(params: SamplingParams) -> SamplingParams:
    """Draws a seed for a request that came without one."""
    if params.seed is not None:
        return params
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**fields | {"seed": secrets.randbelow(MAX_SEED)})


def _extend(output: RequestOutput, tokens: list[int], finish: FinishReason, cached: int) -> None:
    choice = output.outputs[0]
    choice.token_ids += tokens
    choice.finish_reason = finish.text
    if cached >= 0:
        output.num_cached_tokens = cached
