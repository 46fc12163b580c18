"""A model behind simple calls: texts, token ids or conversations in, replies out."""

from __future__ import annotations

import logging
import secrets
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

from hiserve.cache.pools.host_segment import survey
from hiserve.cache.pools.identity import identify
from hiserve.config import Config, known, make_config
from hiserve.core.devices import devices_of
from hiserve.core.machine import probe
from hiserve.core.request import MAX_SEED, SamplingParams
from hiserve.core.resolve import resolve
from hiserve.errors import ConfigError, ContextLengthError, RequestError, UnavailableError
from hiserve.llm.backends import Backend, InProcess, Job, Processes
from hiserve.llm.outputs import ChoiceBuilder, RequestOutput
from hiserve.messages.cache import LOCAL_TIERS, TierName
from hiserve.models.config import ModelConfig
from hiserve.models.shapes import read_model
from hiserve.models.speculation import model_facts
from hiserve.spec.adaptive import StepCosts
from hiserve.text.chat import check_text, parse_chat
from hiserve.text.detokenizer import Spelling
from hiserve.text.output import Output
from hiserve.text.template import ChatTemplate
from hiserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


@dataclass(slots=True, eq=False)
class _Open:
    """A prompt whose choices have not all ended."""

    output: RequestOutput
    num_open: int


class LLM:
    """A model behind a simple call; a context manager.

    Args:
        model: Checkpoint folder, hub id, or ``hiserve-nano``.
        in_process: Plan and execute in this process, without scheduler and worker processes.
        **config: Any setting of ``hiserve.config``, for example ``page_size=16``.

    Attributes:
        config: The settings, resolved.
        tokenizer: The model's.
        default_sampling: What calls without sampling parameters use; see ``--sampling-defaults``.

    Raises:
        ConfigError, ModelError, ResourceError: As for ``hiserve serve``.
    """

    def __init__(self, model: str | Path = "hiserve-nano", *, in_process: bool = False, **config: Any) -> None:
        given = make_config(model=str(model), **config)
        if in_process and given.parallel.replicas > 1:
            raise ConfigError("in_process runs one engine; leave replicas at 1 or in_process off.", param="replicas")
        folder, model_config = read_model(given.model)
        resolved = resolve(given, model_facts(given, folder, model_config), survey(given, probe()))
        if in_process and any(devices_of(resolved.config)):
            raise ConfigError(
                f"in_process runs on the first CUDA device, not on {resolved.config.parallel.devices}; leave devices out and "
                "set CUDA_VISIBLE_DEVICES, or leave in_process off.",
                param="devices",
            )
        for decision in resolved.decisions:
            logger.info(decision)
        self.config = identify(resolved.config, folder, model_config)
        self.tokenizer = Tokenizer.load(folder, model_config.eos_token_ids)
        self._spelling = Spelling(self.tokenizer)
        override = self.config.model.chat_template
        self._template = ChatTemplate.load(folder, None if override is None else Path(override))
        self.default_sampling = _defaults(self.config, model_config)
        self._vocab_size = model_config.vocab_size
        self._is_closed = False
        self._backend: Backend = InProcess(self.config) if in_process else Processes(self.config)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generates for every prompt; the order of the results is that of the prompts.

        Args:
            prompts: One or several texts or lists of token ids.
            sampling: For all, or one for each prompt; the default is ``default_sampling``.

        Raises:
            RequestError: A prompt is empty, has unknown token ids or does not fit the context.
            EngineError: The engine failed a request.
            UnavailableError: The engine was closed or has died.
        """
        self._require_open()
        batch = _as_batch(prompts)
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or self.default_sampling] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"{len(each)} sampling parameters for {len(batch)} prompts; give one, or one each.")
        for params in each:
            self._check(params)
        encoded = [self.encode(prompt) for prompt in batch]
        outputs = list(self._run(zip(encoded, each, strict=True)))
        for prompt, output in zip(batch, outputs, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs

    def generate_each(self, requests: Iterable[tuple[Prompt, SamplingParams]]) -> Generator[RequestOutput, None, None]:
        """Yields a result for each prompt and its sampling parameters, in their order, as soon as it is there.

        Requests are read while the engine has room for them, so there may be any number of them. Closing the
        generator aborts what still runs.

        Raises:
            RequestError: As ``generate``, when the request is read; it ends the batch.
            EngineError, UnavailableError: As ``generate``.
        """
        self._require_open()
        yield from self._run((self.encode(prompt), self._check(params)) for prompt, params in requests)

    def chat(
        self, conversations: Messages | Sequence[Messages], sampling: SamplingParams | None = None, **fields: Any
    ) -> list[RequestOutput]:
        """Answers one or several conversations, each a list of messages with ``role`` and ``content``.

        Args:
            conversations: One or several.
            sampling: For all; the default is ``default_sampling``.
            **fields: As in a chat request: ``tools``, ``documents``, ``chat_template_kwargs`` ...

        Raises:
            RequestError: The model has no chat template, or a message is malformed; and as ``generate``.
        """
        is_one = bool(conversations) and isinstance(conversations[0], dict)
        several = [conversations] if is_one else conversations
        return self.generate([self.encode_chat(messages, **fields) for messages in several], sampling)

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt, checked.

        Raises:
            RequestError: It is empty, has unknown token ids or does not fit the context.
        """
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=True).tolist()
        else:
            if not all(_is_token(value, self._vocab_size) for value in prompt):
                raise RequestError(f"token ids must be integers from 0 to {self._vocab_size - 1}.", param="prompt")
            ids = [int(value) for value in prompt]
        self._check_length(len(ids), "prompt")
        return ids

    def encode_chat(self, messages: Any, **fields: Any) -> list[int]:
        """Returns the token ids of a conversation, up to where the assistant's reply begins; fields as in ``chat``.

        Raises:
            RequestError: The model has no chat template, a message is malformed, or all does not fit the context.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; give a prompt.", param="messages")
        text = self._template.render(parse_chat({"messages": list(messages), **fields}))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).tolist()
        self._check_length(len(ids), "messages")
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
        """What drafts cost, as measured at start: in process, where their number is chosen step by step; else None."""
        return self._backend.draft_costs

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

    def _run(self, requests: Iterable[tuple[list[int], SamplingParams]]) -> Generator[RequestOutput, None, None]:
        """Yields the outputs in the order of the requests, each when all its choices have ended."""
        waiting: deque[_Open] = deque()

        def jobs() -> Iterator[Job]:
            for tokens, sampling in requests:
                request = _Open(RequestOutput(None, tokens), num_open=sampling.n)
                waiting.append(request)
                yield from self._jobs(request, _seeded(sampling))

        with closing(self._backend.run(jobs())) as ended:
            for job in ended:
                job.request.num_open -= 1
                while waiting and not waiting[0].num_open:
                    yield waiting.popleft().output

    def _jobs(self, request: _Open, sampling: SamplingParams) -> Iterator[Job]:
        prompt = np.array(request.output.prompt_token_ids, dtype=np.int32)
        for choice in range(sampling.n):
            # Of the choices of one prompt, the first scores it.
            own = sampling if choice == 0 else msgspec.structs.replace(sampling, prompt_logprobs=None)
            builder = ChoiceBuilder(request.output, choice, own, Output(self._spelling, own))
            yield Job(request, prompt, own, choice, builder.take)

    def _check(self, sampling: SamplingParams) -> SamplingParams:
        """Refuses what this model or engine does not have; returns the parameters.

        Raises:
            RequestError: A token id, or speculation.
        """
        sampling.check_vocabulary(self._vocab_size)
        sampling.check_spec(self.config.spec.tiers[-1])
        return sampling

    def _check_length(self, num_tokens: int, param: str) -> None:
        max_len = known(self.config.model.max_model_len)
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


def _defaults(config: Config, model: ModelConfig) -> SamplingParams:
    """Returns the sampling of calls that do not say, as ``--sampling-defaults`` wants it."""
    return SamplingParams() if config.model.sampling_defaults == "openai" else model.sampling_defaults.params()


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < vocab_size


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(part, Integral) for part in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _seeded(params: SamplingParams) -> SamplingParams:
    """Draws a seed for a request that came without one."""
    if params.seed is not None:
        return params
    return msgspec.structs.replace(params, seed=secrets.randbelow(MAX_SEED))
