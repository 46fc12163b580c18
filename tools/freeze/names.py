"""The names of the frozen logs and those of the code. A rename of the code changes this file and no log.

Keys are the logs' words; values are paths of attributes, from the object that is encoded. Importing this file loads torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

from hiserve import LLM, SamplingParams
from hiserve.core.plan import StepFault
from hiserve.core.request import FinishReason
from hiserve.core.transfers import CopyKind
from hiserve.ipc.messages import Admit

PLAN = {
    "step": "step_id",
    "rows": "rows",
    "new": "num_new",
    "drafts": "num_draft",
    "samples": "samples",
    "scored": "num_scored",
    "bound": "max_len",
    "propose": "num_propose",
    "cold": "is_cold",
    "released": "release",
    "admitted": "admit",
    "table_rows": "table.rows",
    "table_indices": "table.indices",
    "table_pages": "table.pages",
    "table_owners": "table.owners",
    "table_new": "table.are_new",
    "host_released": "host_release",
    "copies": "copies",
    "waits": "waits",
    "lookups": "lookups",
    "relocations": "relocation_version",
    "replay": "may_replay",
}
ADMISSION = {
    "row": "row",
    "tokens": "tokens",
    "prompt": "num_prompt",
    "computed": "num_computed",
    "sampling": "sampling",
    "choice": "choice",
}
COPY = {
    "number": "op",
    "kind": "kind",
    "device": "device_pages",
    "host": "host_pages",
    "after": "after_step",
    "run": "run",
}
RUN = {
    "namespace": "namespace",
    "parent": "parent",
    "digests": "digests",
    "tokens": "key",
    "revision": "draft_revision",
}
LOOKUP = {"request": "uid", "digests": "digests"}
ACK = {"number": "op", "reason": "reason", "bytes": "num_bytes", "pages": "num_pages", "seconds": "seconds"}
RESULT = {
    "step": "step_id",
    "counts": "counts",
    "tokens": "tokens",
    "scores": "scores",
    "prompt_scores": "prompt_scores",
    "faults": "faults",
    "deferred": "deferred",
    "fault": "fault",
}
SCORES = {"own": "logprobs", "top": "top_tokens", "top_scores": "top_logprobs"}
REPORT = {
    "requests": "uids",
    "counts": "counts",
    "ends": "finishes",
    "cached": "cached",
    "drafts": "drafts",
    "tokens": "tokens",
    "words": "score_words",
    "scores": "scores",
    "failed": "failed",
    "published": "published",
    "removed": "removed",
}
CACHED = {"device": "device", "host": "host", "store": "store", "miss": "miss", "at": "miss_at"}
DRAFTS = {"steps": "verify_steps", "proposed": "proposed", "accepted": "accepted_per_position"}
FAULT = {"kind": "kind", "replay": "was_replay"}

KINDS = {CopyKind.LOAD: "load", CopyKind.OFFLOAD: "offload", CopyKind.PREFETCH: "prefetch", CopyKind.UPLOAD: "upload"}
ENDS = {FinishReason.RUNNING: "", FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}

# Texts of the recorded session that have changed: old text -> new text, applied to the recorded logs.
REWORDED: dict[str, str] = {
    '"stores": {': '"offloads": {',
    "graph_gate_created{model_name,reason,verdict}": "graph_gate_created{decision,model_name,reason}",
    "graph_gate_total{model_name,reason,verdict}": "graph_gate_total{decision,model_name,reason}",
}


def value(what: Any, table: Mapping[str, str], key: str) -> Any:
    """Returns the value that the logs call ``key``, of an object of ``table``."""
    return operator.attrgetter(table[key])(what)


def changed(what: Any, table: Mapping[str, str], **values: Any) -> Any:
    """Returns a copy of a frozen object with other values; the names are those of the logs."""
    fields = {name: getattr(what, name) for name in type(what).__dataclass_fields__}
    return type(what)(**fields | {table[key]: each for key, each in values.items()})


# --- doors to an engine of this process ---------------------------------------------------


def engine_of(llm: LLM) -> Any:
    """Returns the engine: ``add``, ``abort``, ``flush``, ``step``, ``has_work``."""
    return llm._backend.engine


def tokens_of(llm: LLM, text: str) -> list[int]:
    """Returns the tokens of a text, without any that stand for its beginning."""
    return [int(token) for token in llm.tokenizer.encode(text, add_special_tokens=False)]


def executor_of(engine: Any) -> Any:
    """Returns what runs its plans."""
    return engine._executor


def replace_executor(engine: Any, executor: Any) -> None:
    """Lets it run its plans by another executor."""
    engine._executor = executor


def wait_for_host(executor: Any, timeout_s: float) -> None:
    """Waits until every page of the host tier is ready; they become so in the background, in real time."""
    if (tiers := executor._tier_transfers) is not None:
        host = tiers._host
        assert host.prefault.wait(host.num_pages, timeout_s), f"{host.num_ready_pages} of {host.num_pages} are ready"


def wait_for_store(executor: Any, timeout_s: float) -> None:
    """Lets each order to the store end before the next is given: a lookup sees every upload and removal before it."""
    if (tiers := executor._tier_transfers) is not None and (store := tiers._store) is not None:
        store._fetches, store._uploads = (_Awaited(jobs, timeout_s) for jobs in (store._fetches, store._uploads))
        store._checksum_timeout_s = timeout_s


class _Awaited:
    """A queue of jobs for threads, each of which has ended when ``put`` returns."""

    def __init__(self, jobs: Any, timeout_s: float) -> None:
        self._jobs = jobs
        self._timeout_s = timeout_s

    def put(self, job: Callable[[], None] | None) -> None:
        """Waits for a job; None ends a thread."""
        if job is None:
            self._jobs.put(None)
            return
        ended = Event()

        def run() -> None:
            try:
                job()
            finally:
                ended.set()

        self._jobs.put(run)
        assert ended.wait(self._timeout_s), f"an order to the store has not ended after {self._timeout_s} s"


def start_before_loads(engine: Any) -> None:
    """Lets rows start before their loads have arrived, as on a GPU."""
    engine._planner._overlaps_loads = True


def admission(uid: int, num_prompt: int, sampling: SamplingParams, tenant: bytes, choice: int, priority: int) -> Any:
    """Returns the message that brings a request to the engine, beside its tokens."""
    return Admit(uid, num_prompt, sampling, tenant, choice, priority, caller=1 + priority if tenant else 0)


def out_of_memory() -> Any:
    """Returns the fault of a step for which memory ran out."""
    return StepFault("out_of_memory", "no memory for it")
