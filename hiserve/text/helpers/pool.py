"""Child processes for Python work that would block the event loop and that, because of the GIL, no thread could do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec

from hiserve.errors import ContextLengthError, HiserveError, RequestError, UnavailableError
from hiserve.ipc.child import JobProcess
from hiserve.ipc.codec import Frames
from hiserve.text.body.parser import Sizes, unpack_slim
from hiserve.text.conversation import Conversation
from hiserve.text.helpers.fair_threads import FairSemaphore
from hiserve.text.template.chat_template import TOO_SLOW, ChatTemplate, Sources

COMMAND = (sys.executable, "-m", "hiserve.text.helpers.process")
NUM_PROCESSES = 2
# An idle process is ended after this time, which frees its memory.
IDLE_S = 8.0


class Setup(msgspec.Struct, frozen=True):
    """First message to a process: the sources of the chat template, if there is one."""

    sources: Sources | None


class Slim(msgspec.Struct, frozen=True, tag=True):
    """Job: ``body.parser.slim`` of the second frame."""

    sizes: Sizes
    is_chat: bool


class Rendering(msgspec.Struct, frozen=True, tag=True):
    """Job: render a conversation, as ``ChatTemplate.render`` does."""

    chat: Conversation
    max_chars: int | None


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer: the second frame is the result. ``is_last``: the process ends now."""

    is_last: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer: the request is at fault; the fields of the error. ``is_last`` as for ``Done``."""

    is_last: bool = False
    is_length: bool
    message: str
    code: str
    param: str | None


Job = Slim | Rendering
Answer = tuple[Done | Refused, bytes]
_ANSWER = msgspec.msgpack.Decoder(Done | Refused)


class HelperPool:
    """A few processes, started on demand and ended when idle. Used in one event loop. Callers take turns."""

    def __init__(self, template: ChatTemplate | None) -> None:
        setup = Setup(None if template is None else template.sources)
        self._free = [_Process(msgspec.msgpack.encode(setup)) for _ in range(NUM_PROCESSES)]
        self._all = tuple(self._free)
        self._turns = FairSemaphore(NUM_PROCESSES)

    async def slim(self, raw: bytes, sizes: Sizes, caller: int, *, is_chat: bool = True) -> dict[str, Any]:
        """Parses a large body in a process; see ``body.parser.slim``.

        Raises:
            RequestError: The body is malformed or exceeds a limit.
        """
        return unpack_slim(await self._do(Slim(sizes, is_chat), raw, caller=caller))

    async def render(self, chat: Conversation, max_chars: int | None, caller: int) -> str:
        """Renders a conversation in a process; see ``ChatTemplate.render``.

        Raises:
            RequestError: As there; the code is ``TOO_SLOW`` also where the process had to be ended.
        """
        return (await self._do(Rendering(chat, max_chars), caller=caller)).decode()

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.gather(*(process.end() for process in self._all))

    async def _do(self, job: Job, *frames: bytes, caller: int) -> bytes:
        """Returns the second frame of the answer. Work of a cancelled caller keeps its process until it ends."""
        message = [msgspec.msgpack.encode(job), *frames]  # may raise, so before a process is acquired
        await self._turns.enter(caller)
        process = self._free.pop()

        def leave(_: object) -> None:
            self._free.append(process)
            self._turns.leave()

        working = _begin(process.do(message))
        working.add_done_callback(leave)
        answer, result = await asyncio.shield(working)
        if isinstance(answer, Done):
            return result
        kind = ContextLengthError if answer.is_length else RequestError
        raise kind(answer.message, code=answer.code, param=answer.param)


def _begin(work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # read here: a cancelled caller does not
    return task


class _Process:
    """One child process, ended when idle."""

    def __init__(self, setup: bytes) -> None:
        self._child = JobProcess(COMMAND, setup)
        self._idle: asyncio.TimerHandle | None = None

    async def do(self, frames: Frames) -> Answer:
        """Sends one job and returns the answer, with the result if there is one.

        Raises:
            RequestError: The job exceeded the limit of time or memory.
            UnavailableError: The process cannot be started.
        """
        self._stop_timer()
        try:
            answered = await self._child.do(frames)
        except HiserveError as error:
            raise UnavailableError(f"a process to read large requests cannot be started: {error}") from None
        if answered is None:
            raise RequestError("the request takes more time or memory to read than any may. Send less.", code=TOO_SLOW)
        head, *result = answered
        answer = _ANSWER.decode(head)
        if answer.is_last:
            self._child.retire()
        else:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._child.retire)
        return answer, b"".join(result)

    async def end(self) -> None:
        """Ends the process if it runs."""
        self._stop_timer()
        await self._child.end()

    def _stop_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
