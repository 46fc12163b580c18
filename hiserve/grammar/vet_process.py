"""Tries out grammars: ``python -m hiserve.grammar.vet_process ENDPOINT``.

``grammar.vet`` starts it and sends one grammar at a time. Nothing in here bounds a grammar but the kernel, which ends the
process where CPU time, stack or memory run out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from hiserve.core.plan import MASK_BITS, Int32Array
from hiserve.core.request import LENIENT
from hiserve.errors import HiserveError, RequestError
from hiserve.grammar.bounds import INVALID
from hiserve.grammar.matcher import Matcher, Vocabulary
from hiserve.grammar.vet import TOO_COMPLEX, Setup, Trial, Verdict
from hiserve.ipc.child import bound_memory, connect_to_parent, serve_jobs
from hiserve.ipc.codec import Frames

JOB_CPU_S = 2.0  # of a grammar, until the kernel ends the process
JOB_S = 60.0  # likewise, of one that waits for something; a busy machine gives a process of this niceness little CPU
STACK_BYTES = 2**20
MAX_MEMORY_BYTES = 2**30  # beyond what it has at its start
NUM_TOKENS = 48  # of the walk
MAX_MASK_S = 0.025
# Added to that of a trial beyond its credit: the engine and the event loop have priority.
NICENESS, MAX_NICENESS = 10, 19
# CPU time that trials take at the priority of the engine: this much at once, and this share of the time in the long run.
# A sound grammar takes some 10 ms; where it yields to processes that keep all cores busy, its verdict takes 0.2 s.
MAX_CREDIT_S, CREDIT_SHARE = 0.25, 0.1
LOOK_S = 0.01
_NUM_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)  # of each octet


def try_out(vocabulary: Vocabulary, num_words: int, trial: Trial) -> Verdict:
    """Returns the verdict on a grammar, if this process survives it."""
    grammar, relaxed = trial.grammar, False
    try:
        matcher = vocabulary.compile(grammar)
    except RequestError as error:
        if not trial.may_relax:
            return Verdict(error.code, error.message)
        grammar, relaxed = grammar.as_kind(LENIENT[grammar.kind]), True
        try:
            matcher = vocabulary.compile(grammar)
        except RequestError as lenient:
            return Verdict(lenient.code, lenient.message)
    warnings = matcher.warnings if relaxed or grammar.kind in ("lark", "either") else []
    seed = int.from_bytes(grammar.digest[:8], "little")
    thought = grammar.opening + grammar.after
    marks = [thought, thought + grammar.header, thought + trial.mark]
    for mark in dict.fromkeys(["", *marks]):  # to these a walk would hardly come
        place = matcher.copy()
        place.advance(vocabulary.tokens(mark))
        if refusal := _walk(place, num_words, seed):
            return refusal
    first = grammar.alternatives[0]  # the others would hide that nothing satisfies it
    if first is not grammar and (refusal := _walk(vocabulary.compile(first), num_words, seed)):
        return refusal
    return Verdict(kind=grammar.kind, warnings=warnings)


def _walk(start: Matcher, num_words: int, seed: int) -> Verdict | None:
    """Follows a grammar by tokens drawn at random, again from its start where it ends; None if nothing is wrong."""
    rng, words = np.random.default_rng(seed), np.zeros(num_words, dtype=np.int32)
    matcher = start.copy()
    for index in range(NUM_TOKENS):
        words[:] = 0
        begin_s = time.thread_time()
        matcher.mask(words)
        took_s = time.thread_time() - begin_s
        if matcher.error:
            if matcher.has_no_text:
                return Verdict(INVALID, "some texts that it begins have no end" if index else "no text satisfies it")
            return Verdict(TOO_COMPLEX, matcher.error)
        if took_s > MAX_MASK_S:
            return Verdict(
                TOO_COMPLEX, f"one token of it takes {1000 * took_s:.0f} ms; the most is {1000 * MAX_MASK_S:.0f}"
            )
        token = draw_allowed(words, rng)
        if token is None:
            return Verdict(INVALID, "no text satisfies it")
        if matcher.advance([token]) is not None:
            matcher = start.copy()
        elif matcher.error:
            return Verdict(TOO_COMPLEX, matcher.error)
    return None


def draw_allowed(words: Int32Array, rng: np.random.Generator) -> int | None:
    """Returns one of the tokens that a mask allows, each as likely; None where it allows none.

    A list of them all would take longer than the mask: 0.2 ms of a vocabulary of 128,000.

    Args:
        words: int32 ``[ceil(vocab_size / MASK_BITS)]``.
        rng: Draws.
    """
    octets = words.view(np.uint8)
    ends = np.cumsum(_NUM_BITS[octets], dtype=np.int32)
    if not ends[-1]:
        return None
    number = int(rng.integers(ends[-1]))
    at = int(np.searchsorted(ends, number, side="right"))
    bits = np.flatnonzero(np.unpackbits(octets[at : at + 1], bitorder="little"))
    return at * 8 + int(bits[number - ends[at]])  # counted from its last one


class Credit:
    """CPU time that trials may take before they yield to all other processes.

    Args:
        clock: Monotonic seconds.
        cpu_clock: Seconds of CPU time of this process.

    Attributes:
        left_s: Seconds; below zero after a trial that took more.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._last_s = clock()
        self.left_s = MAX_CREDIT_S

    def run(self, thread: threading.Thread) -> None:
        """Runs a thread to its end; it yields to all other processes from where the credit ends."""
        now_s, begin_s = self._clock(), self._cpu_clock()
        self.left_s = min(MAX_CREDIT_S, self.left_s + CREDIT_SHARE * (now_s - self._last_s))
        self._last_s = now_s
        thread.start()
        while thread.is_alive() and self._cpu_clock() - begin_s < self.left_s:
            thread.join(LOOK_S)
        if thread.is_alive() and thread.native_id is not None:
            niceness = min(MAX_NICENESS, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.setpriority(os.PRIO_PROCESS, thread.native_id, niceness)  # of this thread alone (Linux)
        thread.join()
        self.left_s -= self._cpu_clock() - begin_s


def _on_small_stack(vocabulary: Vocabulary, num_words: int, trial: Trial, credit: Credit) -> Verdict:
    verdicts: list[Verdict] = []
    threading.stack_size(STACK_BYTES)
    credit.run(threading.Thread(target=lambda: verdicts.append(try_out(vocabulary, num_words, trial))))
    return verdicts[0] if verdicts else Verdict(TOO_COMPLEX, "it takes too much memory")


def serve(endpoint: str) -> int:
    """Serves trials until the parent ends; returns the exit code."""
    link, frames = connect_to_parent(endpoint, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = msgspec.msgpack.decode(frames[0], type=Setup)
    vocabulary: Vocabulary | None = None
    credit = Credit()

    def do(job: Frames) -> Frames:
        nonlocal vocabulary
        try:
            if vocabulary is None:
                vocabulary = Vocabulary.load(Path(setup.folder), setup.vocab_size, setup.eos_token_ids)
                bound_memory(MAX_MEMORY_BYTES)
            signal.setitimer(signal.ITIMER_PROF, JOB_CPU_S)  # the signals' default is to end the process
            signal.setitimer(signal.ITIMER_REAL, JOB_S)
            trial = msgspec.msgpack.decode(job[0], type=Trial)
            verdict = _on_small_stack(vocabulary, -(-setup.vocab_size // MASK_BITS), trial, credit)
        except HiserveError as error:
            verdict = Verdict(error.code, error.message.removesuffix("."))  # the reason ends a sentence
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return [msgspec.msgpack.encode(verdict)]

    return serve_jobs(link, do)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
