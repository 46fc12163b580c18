"""The offline API: texts, token ids or conversations in, replies out."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from hiserve.config.options import make_options
from hiserve.core.devices import devices_of
from hiserve.core.plan import Int32Array
from hiserve.core.request import Grammar, SamplingParams
from hiserve.core.startup_measurements import StepCosts
from hiserve.errors import ConfigError, ContextLengthError, HiserveError, RequestError, UnavailableError
from hiserve.grammar.tools import CustomTools, ToolGrammars
from hiserve.ipc.cache_stats import LOCAL_TIERS, TierName
from hiserve.launch import prepare
from hiserve.llm.offline_backends import BlockingVetting, InProcess, Job, OfflineBackend, Processes
from hiserve.llm.outputs import ChoiceBuilder, RequestOutput
from hiserve.text.abilities import Thinking
from hiserve.text.body.chat import parse_chat
from hiserve.text.body.json import check_text
from hiserve.text.conversation import Conversation
from hiserve.text.frontend import load_frontend
from hiserve.text.reader.output import ReplyOutput, TextOutput

logger = logging.getLogger(__name__)

Messages = Sequence[dict[str, Any]]
Prompt = str | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(slots=True, eq=False)
class _Request:
    """A prompt and its output."""

    output: RequestOutput  # the caller's
    sampling: SamplingParams  # checked
    num_open: int  # choices that have not ended
    chat: Conversation | None = None  # the conversation that the prompt was made from; None for another prompt

    def fail(self, error: HiserveError) -> None:
        """Records the first error of a choice."""
        self.output.error = self.output.error or error


class LLM:
    """A model for offline calls; a context manager.

    Args:
        model: Checkpoint folder, hub id, or ``hiserve-nano``.
        in_process: Plan and execute in this process, without scheduler and worker processes.
        **config: Any option of ``hiserve.config``, for example ``page_size=16``.

    Attributes:
        settings: As resolved; see ``hiserve config``.
        tokenizer: The model's.
        default_sampling: For calls without sampling parameters; see ``--sampling-defaults``.

    Raises:
        ConfigError, ModelError, ResourceError: As for ``hiserve serve``.
    """

    def __init__(self, model: str | Path = "hiserve-nano", *, in_process: bool = False, **config: Any) -> None:
        given = make_options(model=str(model), **config)
        if in_process and given.parallel.replicas > 1:
            raise ConfigError("in_process runs one engine; leave replicas at 1 or in_process off.", param="replicas")
        launch = prepare(given)
        settings = launch.resolved.settings
        if in_process and devices_of(settings) not in ((), tuple(range(settings.parallel.tp))):
            raise ConfigError(
                f"in_process runs on the first CUDA device, not on {settings.parallel.devices}; leave devices out and "
                "set CUDA_VISIBLE_DEVICES, or leave in_process off.",
                param="devices",
            )
        launch.log()
        self.settings = launch.identified()
        self._frontend = load_frontend(self.settings.model, launch.folder, launch.model)
        self._tool_grammars = ToolGrammars(self._frontend.abilities)
        self.tokenizer, self.default_sampling = self._frontend.tokenizer, self._frontend.default_sampling
        self._vocab_size = launch.model.vocab_size
        self._is_closed = False
        self._vetting = BlockingVetting(launch.folder, launch.model.vocab_size, launch.model.eos_token_ids)
        self._backend = self._open(in_process)

    def _open(self, in_process: bool) -> OfflineBackend:
        return InProcess(self.settings) if in_process else Processes(self.settings)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generates for every prompt; the order of the results is that of the prompts.

        A request that the engine fails has its ``RequestOutput.error``; the others go on.

        Args:
            prompts: One or several texts, lists of token ids, or integer arrays ``[n]``; int32 is taken as it is.
            sampling: For all, or one for each prompt; the default is ``default_sampling``.

        Raises:
            RequestError: A prompt is empty, has unknown token ids or does not fit the context. The first prompts run
                while the next ones are read; a wrong one ends the batch.
            UnavailableError: The engine was closed or has died.
        """
        self._require_open()
        batch = as_batch(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or self.default_sampling] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"{len(each)} sampling parameters for {len(batch)} prompts; give one, or one each.")
        for params in each if isinstance(sampling, Sequence) else each[:1]:
            self._check(params)
        return list(self._run(map(self._request, batch, each)))

    def generate_each(self, requests: Iterable[tuple[Prompt, SamplingParams]]) -> Generator[RequestOutput, None, None]:
        """Yields a result for each prompt and its sampling parameters, in their order, as soon as it is there.

        Requests are read while the engine has room for them, so there may be any number of them. Closing the
        generator aborts the requests that still run.

        Raises:
            RequestError: As ``generate``, when the request is read; it ends the batch.
            UnavailableError: As ``generate``.
        """
        self._require_open()
        yield from self._run(self._request(prompt, self._check(params)) for prompt, params in requests)

    def chat(
        self, conversations: Messages | Sequence[Messages], sampling: SamplingParams | None = None, **fields: Any
    ) -> list[RequestOutput]:
        """Answers one or several conversations, each a list of messages with ``role`` and ``content``.

        A reply that comes back in the next call's messages keeps the tokens it was generated with, so that the whole
        history is in the prefix cache.

        Args:
            conversations: One or several.
            sampling: For all; the default is ``default_sampling``.
            **fields: As in a chat request: ``tools``, ``documents``, ``chat_template_kwargs`` ...

        Raises:
            RequestError: The model has no chat template, or a message is malformed; and as ``generate``.
        """
        self._require_open()
        is_one = bool(conversations) and isinstance(conversations[0], dict)
        several: Any = [conversations] if is_one else conversations
        params = self._check(sampling or self.default_sampling)
        return list(self._run(self._chat_request(messages, fields, params) for messages in several))

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt, checked.

        Raises:
            RequestError: It is empty, has unknown token ids or does not fit the context.
        """
        ids: list[int] = self._encode(prompt).tolist()
        return ids

    def encode_chat(self, messages: Any, **fields: Any) -> list[int]:
        """Returns the token ids of a conversation, up to where the assistant's reply begins; fields as in ``chat``.

        Raises:
            RequestError: The model has no chat template, a message is malformed, or all does not fit the context.
        """
        ids: list[int] = self._chat_request(messages, fields, self.default_sampling).output.tokens.tolist()
        return ids

    def flush(self, tiers: tuple[TierName, ...] = LOCAL_TIERS) -> int:
        """Empties tiers of the prefix cache between two batches; returns the pages emptied.

        Raises:
            UnavailableError: The engine was closed or has died.
        """
        self._require_open()
        return self._backend.flush(tiers)

    @property
    def draft_costs(self) -> StepCosts | None:
        """The costs of drafts, measured at start: in process, where their number is chosen step by step; else None."""
        return self._backend.draft_costs

    def close(self) -> None:
        """Stops the processes, or frees the model; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._vetting.close()
            finally:
                self._backend.close()

    def __enter__(self) -> LLM:
        """Starts a ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine."""
        self.close()

    def _run(self, requests: Iterable[_Request]) -> Generator[RequestOutput, None, None]:
        """Yields the outputs in the order of the requests, each when all its choices have ended."""
        waiting: deque[_Request] = deque()

        def jobs() -> Iterator[Job]:
            for request in requests:
                waiting.append(request)
                yield from self._jobs(request)

        with closing(self._backend.run(jobs())) as ended:
            for job in ended:
                job.request.num_open -= 1
                while waiting and not waiting[0].num_open:
                    yield self._finished(waiting.popleft())

    def _jobs(self, request: _Request) -> Iterator[Job]:
        sampling = request.sampling.seeded()
        for choice in range(sampling.n):
            # Of the choices of one prompt, the first scores it.
            own = sampling if choice == 0 else msgspec.structs.replace(sampling, prompt_logprobs=None)
            builder = ChoiceBuilder(request.output, choice, own, self._reader(request, own))
            yield Job(request, request.output.tokens, own, choice, builder.take, request.fail)

    def _reader(self, request: _Request, sampling: SamplingParams) -> ReplyOutput:
        if request.chat is None:
            return TextOutput(self._frontend.token_bytes, sampling)
        return self._frontend.abilities.output(request.chat, request.output.tokens, sampling)

    def _finished(self, request: _Request) -> RequestOutput:
        """Returns the output of a request that has ended; replies to a conversation are remembered."""
        output = request.output
        if output.error is not None:
            logger.warning("a request failed, and the others go on: %s", output.error)
        elif request.chat is not None:
            for choice in output.outputs:
                self._frontend.remember(request.chat, choice.text, choice.token_ids, choice.events)
        return output

    def _request(self, prompt: Prompt, sampling: SamplingParams) -> _Request:
        text = prompt if isinstance(prompt, str) else None
        return _Request(RequestOutput(text, self._encode(prompt)), sampling, num_open=sampling.n)

    def _chat_request(self, messages: Any, fields: dict[str, Any], sampling: SamplingParams) -> _Request:
        chat = self._frontend.abilities.prepared(
            parse_chat({"messages": list(messages), **fields}, CustomTools().pattern), Thinking()
        )
        tokens = self._frontend.encode_chat(chat)
        self._check_length(tokens.size, "messages")
        sampling = self._constrained(chat, tokens, sampling)
        return _Request(RequestOutput(None, tokens), sampling, num_open=sampling.n, chat=chat)

    def _constrained(self, chat: Conversation, prompt: Int32Array, sampling: SamplingParams) -> SamplingParams:
        """Returns the sampling parameters with the grammar of the replies to a conversation, if there is one.

        Raises:
            RequestError: There are two, or it cannot be used; or as ``ToolGrammars.of``.
        """
        grammar = sampling.grammar
        if grammar is not None and grammar.after:
            return sampling
        made = self._tool_grammars.of(chat, None if chat.choice.is_required else grammar)
        if made is not None and grammar is not None and chat.choice.is_required:
            raise RequestError(f"sampling.grammar and {made.param} are two grammars for one reply.", param=made.param)
        grammar = grammar if made is None else made.grammar
        if grammar is None:
            return sampling
        opening, after, header = self._frontend.abilities.marks(chat, prompt)
        grammar = Grammar.of(grammar.kind, grammar.text, after, opening, header=header)
        param, mark, not_held = (made.param, made.mark, made.not_held) if made else ("grammar", "", [])
        if missing := [*not_held, *self._vetting.check(grammar, param, mark)]:
            logger.warning("%s is not held in full: %s", param, "; ".join(missing)[:400])
        return msgspec.structs.replace(sampling, grammar=grammar)

    def _encode(self, prompt: Prompt) -> Int32Array:
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            tokens = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            tokens = check_tokens(prompt, self._vocab_size)
        self._check_length(tokens.size, "prompt")
        return tokens

    def _check(self, sampling: SamplingParams) -> SamplingParams:
        """Checks sampling parameters against this model and engine; returns them.

        Raises:
            RequestError: A token id, speculation, or a grammar that cannot be used.
        """
        sampling.check_vocabulary(self._vocab_size)
        sampling.check_spec(self.settings.spec.tiers[-1])
        if sampling.grammar is not None:
            self._vetting.check(sampling.grammar, "grammar")
        return sampling

    def _check_length(self, num_tokens: int, param: str) -> None:
        max_len = self.settings.model.max_model_len
        if not num_tokens:
            raise RequestError(f"the {param} is empty; give at least one token.", param=param)
        if num_tokens >= max_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; with one to generate, {max_len} is the limit. Shorten it.",
                param=param,
            )

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("this LLM was closed; make a new one.")


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts of a batch; one alone is a batch of one."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]


def check_tokens(prompt: Any, vocab_size: int) -> Int32Array:
    """Returns the ids of a prompt as an array, int32 ``[n]``; an int32 array is returned itself.

    Args:
        prompt: Integers, or an array of integers ``[n]``.
        vocab_size: They must be below it.

    Raises:
        RequestError: It has other values.
    """
    refusal = RequestError(f"token ids must be integers from 0 to {vocab_size - 1}.", param="prompt")
    if isinstance(prompt, np.ndarray):
        ids = prompt
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise refusal
    else:
        try:
            # An array of C takes integers alone, and each in some 20 ns.
            ids = np.asarray(array("q", prompt if isinstance(prompt, list) else list(prompt)))
        except (TypeError, OverflowError):
            raise refusal from None
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise refusal
    return np.ascontiguousarray(ids, dtype=np.int32)
