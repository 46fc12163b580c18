"""Whatever happens in whatever order: one terminal per accepted request, no credit and no request lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hiserve.config.options import Scheduler
from hiserve.scheduler.dispatcher import Dispatcher
from hiserve.scheduler.ledger import Entry, RequestState
from hiserve.scheduler.placement import PrefixIndex
from hiserve.scheduler.queue import POLICIES
from tests.helpers.dispatch import PAGE_SIZE, RecordedEvents, generate, ready, step_updates

ROWS = 2
CAPACITY = ROWS + 1
REPLICAS = (0, 1)


class Conservation(RuleBasedStateMachine):
    """Clients, workers and crashes drive a dispatcher; their events are the witness."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        max_queued=st.sampled_from([2, 1000]),
        queue_timeout_s=st.sampled_from([0.0, 3.0]),
        request_timeout_s=st.sampled_from([0.0, 5.0]),
    )
    def start(self, policy: str, max_queued: int, queue_timeout_s: float, request_timeout_s: float) -> None:
        self.events = RecordedEvents()
        self.now_s = 0.0
        self.limits = Scheduler(
            max_queued_requests=max_queued, queue_timeout_s=queue_timeout_s, request_timeout_s=request_timeout_s
        )
        self.dispatcher = Dispatcher(
            self.events, POLICIES[policy](), PrefixIndex(PAGE_SIZE), self.limits, lambda: self.now_s
        )
        self.uid = 0
        self.accepted: set[int] = set()
        self.alive: set[int] = set()
        self.expected: dict[int, list[int]] = {}
        self.crashes: Counter[int] = Counter()
        self.begin(0)

    def held(self, replica: int) -> list[int]:
        return [
            uid
            for uid, entry in ((uid, self.dispatcher.ledger.get(uid)) for uid in sorted(self.accepted))
            if entry is not None and entry.replica == replica
        ]

    def isolated(self) -> list[Entry]:
        groups = [group for each in self.dispatcher.isolation._suspects.values() for group in each.groups]
        return [entry for group in groups for entry in group]

    def queued(self) -> set[int]:
        queue = [waiting.entry.uid for waiting in self.dispatcher.queue]
        suspects = [entry.uid for entry in self.isolated()]
        assert len({*queue, *suspects}) == len(queue) + len(suspects)
        return {*queue, *suspects}

    @rule(replica=st.sampled_from(REPLICAS))
    def begin(self, replica: int) -> None:
        if replica not in self.alive:
            self.alive.add(replica)
            self.dispatcher.worker_ready(replica, ready(replica, rows=ROWS, max_len=32))
            self.dispatcher.dispatch()

    @rule(replica=st.sampled_from(REPLICAS))
    def lose(self, replica: int) -> None:
        if replica in self.alive:
            self.alive.discard(replica)
            for uid in self.held(replica):
                self.crashes[uid] += 1
            self.dispatcher.worker_lost(replica)
            self.dispatcher.dispatch()

    @rule(
        lengths=st.lists(st.integers(0, 34), min_size=1, max_size=6),
        token=st.integers(0, 2),
        priority=st.integers(-1, 1),
        caller=st.integers(0, 2),
    )
    def submit(self, lengths: list[int], token: int, priority: int, caller: int) -> None:
        for length in lengths:
            self.uid += 1
            message = generate(self.uid, priority=priority, caller=caller)
            self.dispatcher.submit(message, np.full(length, token, dtype=np.int32))
            if self.events.terminals[self.uid] == ["overloaded"]:
                assert len(self.queued()) >= self.limits.max_queued_requests
                event("refused")
            elif 0 < length < 32:
                self.accepted.add(self.uid)
        self.dispatcher.dispatch()

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.dispatcher.expire()
        self.dispatcher.dispatch()
        delay_s = self.dispatcher.seconds_to_deadline()
        assert delay_s is None or delay_s > 0
        for uid in self.queued():
            entry = self.dispatcher.ledger.get(uid)
            assert entry is not None
            limits_s = (0.0 if self.crashes[uid] else self.limits.queue_timeout_s, self.limits.request_timeout_s)
            for limit_s in limits_s:
                assert not limit_s or self.now_s - entry.accepted_at_s < limit_s

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uids = data.draw(st.lists(st.integers(1, self.uid + 2), max_size=4))
        uids += data.draw(st.lists(st.sampled_from(sorted(self.queued()) or [1]), max_size=2))
        event(f"aborts while queued: {any(uid in self.queued() for uid in uids)}")
        self.dispatcher.abort(uids)
        self.dispatcher.dispatch()

    @rule(replica=st.sampled_from(REPLICAS), data=st.data())
    def step(self, replica: int, data: st.DataObject) -> None:
        if replica not in self.alive:
            return
        rows, failed = [], []
        for uid in self.held(replica):
            fate = data.draw(st.sampled_from(["nothing", "token", "tokens", "stop", "fail", "abort"]))
            tokens = {"token": [1], "tokens": [1, 2, 3], "stop": [4]}.get(fate, [])
            if fate == "fail":
                failed.append(uid)
            elif fate != "nothing":
                rows.append((uid, tokens, {"stop": 1, "abort": 3}.get(fate, 0)))
            self.expected.setdefault(uid, []).extend(tokens)
        self.dispatcher.report(replica, step_updates(*rows, failed=tuple(failed)))
        self.dispatcher.dispatch()

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        ledger, queue = self.dispatcher.ledger, self.dispatcher.queue
        assert ledger.num_accepted == len(self.accepted) == ledger.num_ended + len(ledger)
        queued = self.queued()
        assert len(queued) == len(queue) + len(self.isolated())
        assert all(ledger.get(uid) is not None for uid in queued)
        for uid in self.accepted:
            entry = ledger.get(uid)
            assert len(self.events.terminals[uid]) == (entry is None)
            if entry is not None:
                assert (entry.state is RequestState.QUEUED) == (entry.replica is None) == (uid in queued)
                assert entry.generated.tolist() == self.events.sent[uid]

    @invariant()
    def credits_are_the_requests_held(self) -> None:
        for replica in self.alive:
            held = len(self.held(replica))
            assert self.dispatcher.placement.num_held(replica) == held <= CAPACITY
            is_apart = replica in self.dispatcher.isolation
            assert held == CAPACITY or len(self.dispatcher.queue) == 0 or is_apart

    @invariant()
    def nothing_is_admitted_twice_and_no_token_is_lost(self) -> None:
        for uid, count in Counter(uid for _, uid in self.events.admitted).items():
            assert count <= 1 + self.crashes[uid]
        for uid, tokens in self.expected.items():
            assert self.events.sent[uid] == tokens

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        for replica in REPLICAS:
            self.begin(replica)
        for _ in range(self.uid):
            for replica in REPLICAS:
                rows = [(uid, [9], 1) for uid in self.held(replica)]
                self.dispatcher.report(replica, step_updates(*rows))
            self.dispatcher.dispatch()
        assert len(self.dispatcher.queue) == len(self.dispatcher.ledger) == 0
        assert all(len(self.events.terminals[uid]) == 1 for uid in range(1, self.uid + 1))


Conservation.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestConservation = Conservation.TestCase
