"""The rows and steps of a worker, in its answers to ``/debug/rows`` and ``/debug/steps``."""

from __future__ import annotations

from typing import Literal

import msgspec

LEASE_S = 10.0  # a worker records steps for so long after it was asked for rows or steps
MAX_STEPS = 4096  # it keeps
Subject = Literal["rows", "steps"]


class RowFacts(msgspec.Struct, frozen=True):
    """A row, without its tokens, which are a user's text."""

    row: int
    uid: int  # of its request
    state: Literal["load", "prefill", "decode"]
    num_prompt: int  # tokens
    num_cached: int | None  # prompt tokens that were not computed; None once it was preempted
    source: str  # the tier that gave most of them; one of ``core.usage.SOURCES``
    num_computed: int  # tokens computed by steps that have ended
    num_generated: int  # tokens
    num_left: int  # tokens that it may still generate
    num_pages: int  # of the device
    num_window_pages: int  # of layers with a window, beside those; 0 where they share them
    priority: int
    has_grammar: bool
    num_drafts: int  # verified
    num_accepted: int  # of them


class StepRecord(msgspec.Struct, frozen=True):
    """A step that has ended. Its times are of ``time.monotonic``."""

    step: int  # its number in the worker
    begin_s: float  # it was launched, and no step before it ran
    end_s: float  # its result was there
    num_rows: int
    num_tokens: int  # computed, drafts included
    num_prefill: int  # of them, those of rows that computed more than one token and its drafts
    num_emitted: int  # tokens drawn
    num_drafts: int  # verified
    num_accepted: int  # of them
    decision: str  # of the gate: replay, eager or defer; empty without rows
    reason: str  # of the decision
    mask_s: float  # its draw waited for the masks of grammars
    num_copies: int  # between tiers, started with it
    fault: str  # kind of its failure; empty without one


class WorkerView(msgspec.Struct, frozen=True):
    """The answer of one worker: its rows, or its steps."""

    replica: int
    incarnation: int
    until_s: float  # time of the answer; steps that ended later are not in it
    rows: list[RowFacts] = []
    steps: list[StepRecord] = []  # oldest first
