"""Tries out the grammars of offline calls before an engine gets them, as the server does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from hiserve.core.request import Grammar
from hiserve.grammar.vet import Vetting


class BlockingVetting:
    """``grammar.vet.Vetting`` for callers without an event loop. It starts a thread and a process with the first grammar.

    Args:
        folder: As for ``Vetting``, like the others.
        vocab_size: Of the model.
        eos_token_ids: Its end tokens.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vetting = Vetting(folder, vocab_size, eos_token_ids)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._callers = count()  # each call is a caller of its own: none waits for the grammars of another

    def check(self, grammar: Grammar, param: str, mark: str = "") -> list[str]:
        """Returns a warning for each constraint that the grammar does not express.

        Args:
            grammar: The grammar.
            param: Its name in errors.
            mark: As of ``grammar.vet.Trial``.

        Raises:
            RequestError: As ``Vetting.check``.
            UnavailableError: As ``Vetting.check``.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="hiserve-vet", daemon=True)
            self._thread.start()
        checking = self._vetting.check(grammar, param, mark=mark, caller=next(self._callers))
        _, warnings = asyncio.run_coroutine_threadsafe(checking, self._loop).result()
        return warnings

    def close(self) -> None:
        """Ends the process and the thread."""
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._vetting.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
