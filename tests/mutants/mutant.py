"""What a mutant is: one guard of the package taken out, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One replacement in the source, under which the named test must fail.

    Leave out equivalent ones: those that change no behaviour.

    Attributes:
        name: What is broken, in a few words; unique.
        file: Path relative to the repository, inside ``hiserve/`` or ``benchmarks/``.
        old: Text to replace; occurs exactly once in the file.
        new: Its replacement.
        test: Node ids (or files) for pytest, separated by spaces.
        timeout_s: Longest the test may take, in seconds; less where the broken package would never end.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    timeout_s: float = 300.0
