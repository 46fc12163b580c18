"""The seam: BatchPlan goes to the executing half, StepResult comes back.

Both are frozen, columnar (one array per field) and without tensors, so that they can be logged, replayed, broadcast to
tensor-parallel ranks and tested without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hiserve.core.request import SamplingParams
from hiserve.core.transfers import NO_PAGES, PageCopy, StoreLookup

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

WORD_BYTES = 4  # of a packed score, as of a token id
MAX_FOLLOWING = 64  # tokens of a continuation
MAX_SCORED_TOKENS = 512  # of prompts in one step: each takes a row of logits
NO_MASK = -1  # in ``MaskPlan.entries``: all tokens are allowed
MASK_BITS = 32  # tokens of a mask's word


@dataclass(frozen=True, slots=True, eq=False)
class RowAdmit:
    """A request takes a permanent row.

    Attributes:
        row: 1 to max_rows. Row 0 is the padding row.
        tokens: int32 ``[known]``. Prompt, then tokens generated before a preemption or crash.
        num_prompt: Leading tokens that are the prompt.
        num_computed: Leading tokens whose KV came from the prefix cache.
        sampling: With ``seed`` set (drawn at admission when the caller gave none).
        choice: Index among the request's n choices; part of the random key.
        restore_slot: Slot of the snapshot at ``num_computed``, which the row's states and rings start from; 0 is none: they
            are empty. It is read before the first step of the row, behind the loads that this step waits for; the slot
            keeps its content until then.
    """

    row: int
    tokens: Int32Array
    num_prompt: int
    num_computed: int
    sampling: SamplingParams
    choice: int = 0
    restore_slot: int = 0


def _empty() -> Int32Array:
    return NO_PAGES


def _no_times() -> Int64Array:
    return np.empty(0, dtype=np.int64)


def _none() -> BoolArray:
    return np.empty(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class TableWrites:
    """Page-table entries to write before the step, as four parallel columns.

    Covers pages newly given to a row, pages of a cached prefix, and relocations (an entry
    that moves to the canonical copy of the same bytes).

    Attributes:
        rows: int32 ``[W]``. Which row's table.
        indices: int32 ``[W]``. Which entry: covers positions ``index * page_size`` and on.
        pages: int32 ``[W]``. The page, never 0 (the padding page).
        owners: int32 ``[W]``. Number of the allocation that handed the page out.
            The device keeps ``page_owner[page]``; an entry whose owner differs is stale.
        are_new: bool ``[W]``. The page was handed out for tokens that are to be computed. Without elements, none was.
    """

    rows: Int32Array = field(default_factory=_empty)
    indices: Int32Array = field(default_factory=_empty)
    pages: Int32Array = field(default_factory=_empty)
    owners: Int32Array = field(default_factory=_empty)
    are_new: BoolArray = field(default_factory=_none)


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotWrites:
    """Boundaries at which rows store snapshots, as three parallel columns; applied before the step.

    An assignment replaces the former one of its row, and lasts until then or until the row is released. The step that
    takes the row's state from below the boundary to it or past it (``state_len < boundary <= state_end``) stores the
    snapshot of the boundary. The state of a step covers the tokens before its drafts.

    Attributes:
        rows: int32 ``[N]``. Each at most once.
        boundaries: int32 ``[N]``. In tokens, whole pages.
        slots: int32 ``[N]``. The slot to store into; 0 takes the assignment away.
    """

    rows: Int32Array = field(default_factory=_empty)
    boundaries: Int32Array = field(default_factory=_empty)
    slots: Int32Array = field(default_factory=_empty)


NO_WRITES = TableWrites()  # of every plan without any: a plan makes no arrays for what it lacks
NO_SNAPSHOTS = SnapshotWrites()


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """One step, as the planner wants it. Applied in this order: release, admit, table, snapshots, copies, step.

    A plan without rows only changes rows and starts copies.

    Attributes:
        step_id: Monotone from 1.
        release: int32 ``[R]``. Rows released first.
        admit: Requests that take a row.
        table: Page-table entries to write.
        window_table: Entries of window tables to write; pages and owners are those of the window layers' pool.
        snapshots: Boundaries at which rows store snapshots from this step on.
        rows: int32 ``[B]``. Rows of this step; each appears once. Those that compute one token, and their drafts,
            come before those with more of a prompt.
        num_new: int32 ``[B]``. Tokens to compute, drafts included; at least 1.
        num_draft: int32 ``[B]``. Of these, how many are drafts; only where ``samples``.
        samples: bool ``[B]``. The row reaches the end of its known tokens and emits tokens.
        num_scored: int32 ``[B]``. Of the new tokens, the first that many are followed by a prompt token
            whose log-probability is wanted.
        max_len: int32 ``[B]``. Upper bound of the row's length after the step (the exact
            length lives on the device).
        num_propose: Drafts to propose, once the step is done, for each row that samples.
        continuations: int32 ``[S, 2 + N]``, of the rows that sample: tokens of the row that were known when the step was
            planned; how many of the last of them agree with an earlier reply, 0 for none; the N tokens that follow there.
            N, at most ``MAX_FOLLOWING``, covers the tokens that steps in flight append, this one included, and ``num_propose``
            more. None where no replies are searched.
        is_cold: The proposer does not run after the step, and lacks its tokens; ``num_propose`` is 0.
        host_release: int32 ``[H]``. Host pages freed before the copies.
        host_retained: int32 ``[K]``. Host pages whose retention is recorded after the copies were started.
        host_retained_until_s: int64 ``[K]``. Until when each is retained.
        copies: Copies between tiers to start. The step reads none of their targets, except those of ``waits``.
        waits: Loads, of this plan or an earlier one, whose pages the step reads: its forward waits for them on the device.
        lookups: Lookups in the store.
        relocation_version: Version under which the page tables were planned.
        may_replay: The step may be replayed as a graph.
        awaits_masks: A row that samples has a grammar: the step is launched in two halves, and its draw waits for a
            ``MaskPlan``.
    """

    step_id: int
    rows: Int32Array
    num_new: Int32Array
    num_draft: Int32Array
    samples: BoolArray
    num_scored: Int32Array
    max_len: Int32Array
    num_propose: int = 0
    continuations: Int32Array | None = None
    is_cold: bool = False
    release: Int32Array = field(default_factory=_empty)
    admit: tuple[RowAdmit, ...] = ()
    table: TableWrites = NO_WRITES
    window_table: TableWrites = NO_WRITES
    snapshots: SnapshotWrites = NO_SNAPSHOTS
    host_release: Int32Array = field(default_factory=_empty)
    host_retained: Int32Array = field(default_factory=_empty)
    host_retained_until_s: Int64Array = field(default_factory=_no_times)
    copies: tuple[PageCopy, ...] = ()
    waits: tuple[int, ...] = ()
    lookups: tuple[StoreLookup, ...] = ()
    relocation_version: int = 0
    may_replay: bool = True
    awaits_masks: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return int(self.num_new.sum())


@dataclass(frozen=True, slots=True, eq=False)
class MaskPlan:
    """The tokens that the grammars of a step's rows allow; its forward needs none of it, and is launched before.

    The arrays are lent by the executor (``MaskBuffers``), and filled in place.

    Attributes:
        step_id: The plan's.
        entries: int32 ``[S * width]``. For each row of logits that the step samples from, the index of its mask, or
            ``NO_MASK``.
        masks: int32 ``[M, ceil(vocab_size / 32)]``. Bit t % 32 of word t // 32 allows token t.
    """

    step_id: int
    entries: Int32Array
    masks: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities of N tokens under the model's own distribution, and the K likeliest tokens of each.

    Attributes:
        logprobs: float32 ``[N]``. Of the tokens themselves; natural logarithm, at most 0.
        top_tokens: int32 ``[N, K]``. The likeliest tokens, best first; K is the most that any row asked for.
        top_logprobs: float32 ``[N, K]``. Theirs.
    """

    logprobs: Float32Array
    top_tokens: Int32Array
    top_logprobs: Float32Array

    def pack(self, index: int, num_top: int, num_tokens: int = 1) -> bytes:
        """Returns the scores of ``num_tokens`` tokens, each as ``1 + 2 * num_top`` little-endian words of four bytes.

        The words of a token are its logprob, ``num_top`` token ids, and their logprobs.
        """
        which = slice(index, index + num_tokens)
        columns = (
            self.logprobs[which, None].view(np.int32),
            self.top_tokens[which, :num_top],
            self.top_logprobs[which, :num_top].view(np.int32),
        )
        return np.concatenate(columns, axis=1).tobytes()

    @classmethod
    def unpack(cls, packed: bytes, num_top: int) -> Scores:
        """Returns the scores of tokens that ``pack`` wrote one after the other with the same ``num_top``."""
        words = np.frombuffer(packed, dtype="<i4").reshape(-1, 1 + 2 * num_top)
        return cls(
            logprobs=words[:, 0].view("<f4"),
            top_tokens=words[:, 1 : 1 + num_top],
            top_logprobs=words[:, 1 + num_top :].view("<f4"),
        )


@dataclass(frozen=True, slots=True)
class StepFault:
    """The reason why a step failed although the device works."""

    kind: str  # ``OUT_OF_MEMORY`` or ``OUT_OF_RESOURCES`` of ``core.step_faults``
    message: str  # the first line of the error
    was_replay: bool = False  # the step was replayed as a graph


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of a step, for its sampling rows in plan order.

    Attributes:
        step_id: The plan's.
        counts: int32 ``[S]``. Tokens emitted by each sampling row: accepted drafts + 1;
            0 for a row in ``faults``.
        tokens: int32 ``[S, 1 + max draft]``. Row s holds ``counts[s]`` tokens; the rest is undefined.
        scores: Of the emitted tokens, N = S * (1 + max draft) in the order of ``tokens``; None when no row
            of the step wants them.
        prompt_scores: Of prompt tokens, N = ``num_scored.sum()`` in plan order; None when there are none.
        faults: int32 ``[F]``. Rows of the plan whose page table or ``last_loc`` failed the
            device check; their writes went to the padding page and their tokens are undefined.
        deferred: Reason why the gate deferred the step, which computed nothing; empty if it ran.
        fault: Reason why the step failed, perhaps half computed: its rows on the device are undefined. None if it did not.
    """

    step_id: int
    counts: Int32Array
    tokens: Int32Array
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    faults: Int32Array = field(default_factory=_empty)
    deferred: str = ""
    fault: StepFault | None = None
