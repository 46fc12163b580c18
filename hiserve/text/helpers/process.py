"""Parses large requests and renders long conversations: ``python -m hiserve.text.helpers.process ENDPOINT``.

``helpers.pool`` starts it and sends one job at a time. Each job has a limit of CPU time, at which the kernel ends
the process, and of memory. After a job that left much memory allocated, the process ends to return it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from hiserve.errors import ContextLengthError, RequestError
from hiserve.ipc.child import bound_memory, connect_to_parent, serve_jobs
from hiserve.ipc.codec import Frames
from hiserve.text.body.parser import slim
from hiserve.text.helpers.pool import Done, Job, Refused, Rendering, Setup, Slim
from hiserve.text.template.encoders import template_of

JOB_CPU_S = 10.0
MAX_MEMORY_BYTES = 4 * 2**30  # beyond what it has at its start
KEPT_MEMORY_BYTES = 256 * 2**20
# The engine and the event loop have priority.
NICENESS = 10


class Helper:
    """Runs jobs."""

    def __init__(self, setup: Setup) -> None:
        self._template = None if setup.sources is None else template_of(setup.sources)
        self._jobs = msgspec.msgpack.Decoder(Job)

    def answer(self, frames: Frames) -> Frames:
        """Returns the answer to one job."""
        try:
            result = self._do(self._jobs.decode(frames[0]), frames[1:])
        except MemoryError:
            return _refusal(RequestError("the request takes too much memory to read. Send less."))
        except RequestError as error:
            return _refusal(error)
        return [msgspec.msgpack.encode(Done(is_last=_has_grown())), result]

    def _do(self, job: Job, frames: Frames) -> bytes:
        match job:
            case Slim():
                return slim(frames[0], job.sizes, is_chat=job.is_chat)
            case Rendering():
                assert self._template is not None, "a conversation without a template"
                return self._template.render(job.chat, max_chars=job.max_chars).encode()


def _refusal(error: RequestError) -> Frames:
    is_length = isinstance(error, ContextLengthError)
    refused = Refused(
        is_last=_has_grown(), is_length=is_length, message=error.message, code=error.code, param=error.param
    )
    return [msgspec.msgpack.encode(refused)]


def _has_grown() -> bool:
    """Whether this process exceeds its memory and should end."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize() > KEPT_MEMORY_BYTES


def serve(endpoint: str) -> int:
    """Serves jobs until the parent ends; returns the exit code."""
    link, frames = connect_to_parent(endpoint, signal.SIGKILL)
    os.nice(NICENESS)
    bound_memory(MAX_MEMORY_BYTES)
    helper = Helper(msgspec.msgpack.decode(frames[0], type=Setup))

    def do(job: Frames) -> Frames:
        signal.setitimer(signal.ITIMER_PROF, JOB_CPU_S)  # the signal's default is to end the process
        answer = helper.answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return answer

    return serve_jobs(link, do)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
