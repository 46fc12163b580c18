"""What orders a step's reads against everybody's writes, told from events alone: the oracle of the gate.

A world is two rows with two pages each, a step planned for them, and what happens until it is launched: loads are ordered,
started and answered, rows' pages move, the cache is flushed, freed pages get new tenants. Of each load it says what is over
when that begins. It shares nothing with the gate: neither a list of open loads nor a comparison of versions. A step is in
danger when it reads a page that somebody writes and neither is over when the other begins, or that is not its row's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

ROWS = (1, 2)
NOBODY = 0
OWNERS = {"a": 1, "b": 2, "c": NOBODY}  # whose prefix each load brings; that of nobody is for a row of another step
FORWARDS = frozenset(("forwards before",))  # on the step's stream; what was freed waits for them and no others


class Load(NamedTuple):
    """A load that has a number.

    Attributes:
        name: Of ``OWNERS``.
        op: Its number.
        page: Where it writes.
        over: What is over when it begins; None until it is started.
        answer: What the host was told of its end: ok, failed, or nothing yet.
    """

    name: str
    op: int
    page: str
    over: frozenset[str] | None = None
    answer: str = ""


class Planned(NamedTuple):
    """What the step was planned with.

    Attributes:
        pages: Of each row: the pages that it reads.
        waits: Of each row: the loads that it reads and that had not arrived.
        version: How many moves there had been, of any row.
    """

    pages: tuple[tuple[str, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    version: int


class World(NamedTuple):
    """A moment before the launch, with all that can tell it from others.

    Attributes:
        known: What the host knows to be over: it is over for everything that begins later.
        loads: In the order of their numbers.
        own: Of each row: the page that it computed itself.
        freed: Pages without a tenant, in the order in which they lost it.
        num_moves: Of rows' pages.
        moved: Of each row: which move was its last; 0 is none.
        is_flushed: The cache was emptied of what no row holds.
        planned: The step, once it is planned.
    """

    known: frozenset[str] = frozenset()
    loads: tuple[Load, ...] = ()
    own: tuple[str, ...] = tuple(f"own page of row {row}" for row in ROWS)
    freed: tuple[str, ...] = ()
    num_moves: int = 0
    moved: tuple[int, ...] = (0, 0)
    is_flushed: bool = False
    planned: Planned | None = None

    def next(self) -> Iterator[World]:
        """Every world that may come after this one."""
        for name, owner in OWNERS.items():
            is_new = all(load.name != name for load in self.loads)
            if is_new and (owner == NOBODY or self.planned is None):  # a row joins no step before its loads are ordered
                yield self._order(name)
        for load in self.loads:
            if load.over is None:
                yield self._tell(load._replace(over=self.known | FORWARDS))
                break  # they are started in the order of their numbers
        for load in self.loads:
            if load.over is not None and not load.answer:
                yield self._tell(load._replace(answer="ok"))._replace(known=self.known | {load.name} | load.over)
                yield self._tell(load._replace(answer="failed"))
        for row in ROWS:
            if not self.moved[row - 1]:
                yield self._move(row)
        if not self.is_flushed:
            yield self._replace(is_flushed=True, freed=(*self.freed, "page of nobody"))
        if self.planned is None:
            yield self._replace(planned=self._plan())

    def _order(self, name: str) -> World:
        """A load gets its number and its pages: the first that was freed, if it is for another step."""
        op = len(self.loads) + 1
        if OWNERS[name] == NOBODY and self.freed:
            return self._replace(loads=(*self.loads, Load(name, op, self.freed[0])), freed=self.freed[1:])
        return self._replace(loads=(*self.loads, Load(name, op, f"prefix of row {OWNERS[name]}")))

    def _tell(self, now: Load) -> World:
        return self._replace(loads=tuple(now if load.name == now.name else load for load in self.loads))

    def _move(self, row: int) -> World:
        """A row's own page gives way to another one that has held the same for long."""
        own, moved, num_moves = list(self.own), list(self.moved), self.num_moves + 1
        freed, own[row - 1], moved[row - 1] = own[row - 1], f"shared page of row {row}", num_moves
        return self._replace(own=tuple(own), moved=tuple(moved), num_moves=num_moves, freed=(*self.freed, freed))

    def _plan(self) -> Planned:
        pages = tuple((f"prefix of row {row}", self.own[row - 1]) for row in ROWS)
        loads = [[load for load in self.loads if OWNERS[load.name] == row and load.answer != "ok"] for row in ROWS]
        return Planned(pages, tuple(tuple(load.op for load in of_row) for of_row in loads), self.num_moves)

    def dangers(self, rows: Collection[int], waits: Collection[int]) -> list[str]:
        """Why a launch of the step now would be wrong; empty when it is right.

        Args:
            rows: Of the step.
            waits: Ops that the device waits for first. To wait for one that was not started is to wait for nothing.
        """
        assert self.planned is not None, "nothing to launch"
        over = self.known | FORWARDS
        for load in self.loads:
            if load.op in waits and load.over is not None:
                over |= {load.name} | load.over
        found = []
        for row in rows:
            for page in self.planned.pages[row - 1]:
                found += [danger for load in self.loads if load.page == page for danger in _dangers(load, row, over)]
                if page in self.freed:  # its next tenant waits for FORWARDS, and not for this launch
                    found.append(f"row {row} reads {page} while its next tenant writes")
        return found

    @property
    def is_loading(self) -> bool:
        """Whether any load runs, as far as the host knows."""
        return any(load.over is not None and not load.answer for load in self.loads)


def _dangers(load: Load, row: int, over: frozenset[str]) -> Iterator[str]:
    """What is wrong about reading the page of a load for a row."""
    if OWNERS[load.name] != row:
        yield f"row {row} reads {load.page}, which is the page of load {load.name}"
    if load.name not in over:
        yield f"row {row} reads {load.page} while load {load.name} writes"
    if load.answer == "failed":
        yield f"row {row} reads {load.page}, which load {load.name} never brought"


def all_worlds() -> list[World]:
    """Returns every world that can come about."""
    seen = {World()}
    todo = list(seen)
    while todo:
        for world in todo.pop().next():
            if world not in seen:
                seen.add(world)
                todo.append(world)
    return list(seen)
