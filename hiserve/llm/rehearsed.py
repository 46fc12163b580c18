"""The offline API with a rehearsed proposer, for measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiserve.cache.storage.device import DevicePool
from hiserve.config.settings import Settings
from hiserve.core.drafts import Proposer
from hiserve.engine.runner_factory import open_proposer
from hiserve.errors import ConfigError
from hiserve.llm.api import LLM
from hiserve.llm.offline_backends import InProcess, OfflineBackend
from hiserve.models.draft_config import DraftConfig
from hiserve.models.draft_heads import DraftHead
from hiserve.runners.device_rows import DeviceRows
from hiserve.spec.rehearsed import RehearsedProposer, RehearsedReplies


class RehearsedLLM(LLM):
    """An engine in this process whose head is paid for, and whose drafts are recorded replies (``rehearse``)."""

    def __init__(self, model: str | Path = "hiserve-nano", **config: Any) -> None:
        self._replies: RehearsedReplies | None = None
        super().__init__(model, in_process=True, **config)

    def rehearse(self, texts: Mapping[int, Sequence[int]], acceptance: float) -> None:
        """Sets the drafts of requests; none may run.

        Args:
            texts: Prompt and reply of each request, by its seed, which is below ``max_running_requests``.
            acceptance: The probability that a draft is right.
        """
        assert self._replies is not None, "an engine without a proposer rehearses nothing"
        self._replies.record(texts, acceptance)

    def _open(self, in_process: bool) -> OfflineBackend:
        assert in_process
        return InProcess(self.settings, self._rehearsed)

    def _rehearsed(
        self,
        settings: Settings,
        draft: DraftConfig | None,
        head: DraftHead | None,
        pool: DevicePool,
        rows: DeviceRows,
    ) -> Proposer:
        proposer = open_proposer(settings, draft, head, pool, rows)
        if proposer is None or head is None:
            raise ConfigError(
                f"--spec is {settings.spec.spec}, and drafts are rehearsed at the cost of a head. Name one: eagle3, mtp, "
                "eagle3:PATH, mtp:PATH or draft:PATH.",
                param="spec",
            )
        if rows.state.trees is not None:
            raise ConfigError(
                f"--spec-tree is {settings.spec.spec_tree}, but drafts are rehearsed as chains. Leave it out.",
                param="spec_tree",
            )
        num_requests, max_len = rows.state.tokens.shape
        self._replies = RehearsedReplies(num_requests - 1, max_len, self._vocab_size, rows.device)
        return RehearsedProposer(proposer, self._replies, rows.state, rows.sampling)
