"""Grammars of requests in an engine: waited for, followed, failed; requests without one cost nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.plan import MASK_BITS, NO_MASK, BatchPlan, Int32Array
from hiserve.core.request import FinishReason, Grammar
from hiserve.core.usage import GrammarStats
from hiserve.engine import grammars
from hiserve.engine.grammars import NO_END, GrammarRows, Masks, no_vocabulary
from hiserve.engine.queue import Request
from hiserve.errors import GrammarLimitError, RequestError, to_error
from hiserve.grammar import compiler
from hiserve.grammar.compiler import Compiler
from hiserve.grammar.matcher import Matcher, MatcherThreads, Vocabulary
from hiserve.llm.offline_backends import BlockingVetting
from tests.helpers.cache_paths import SETTINGS
from tests.helpers.grammars import GRAMMARS, nano_tokenizer, nano_vocabulary
from tests.helpers.tiered import engine_of
from tests.helpers.waiting import PATIENCE_S, wait_until

VOCAB_SIZE = 4096


def ids(text: str) -> list[int]:
    return nano_tokenizer().encode(text, add_special_tokens=False).tolist()


def request(uid: int, grammar: Grammar | None, said: str = "") -> Request:
    tokens = np.array([5, 6, 7, *ids(said)], dtype=np.int32)
    return Request(uid, tokens, 3, SamplingParams(seed=1, grammar=grammar), b"", choice=0)


def admitted(rows: GrammarRows, row: int, grammar: Grammar | None, said: str = "") -> Request:
    one = request(row, grammar, said)
    while rows.is_awaited(one):
        threading.Event().wait(0.001)
    rows.admit(row, one)
    return one


def plan_of(rows: list[int], num_draft: list[int], samples: list[bool] | None = None) -> BatchPlan:
    drafts = np.array(num_draft, dtype=np.int32)
    return BatchPlan(
        step_id=4,
        rows=np.array(rows, dtype=np.int32),
        num_new=drafts + 1,
        num_draft=drafts,
        samples=np.array(samples or [True] * len(rows)),
        num_scored=np.zeros(len(rows), dtype=np.int32),
        max_len=drafts + 20,
    )


def bits(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def start_masks(rows: GrammarRows, plan: BatchPlan, drafts: dict[int, list[int]] | None = None) -> Callable[[], Masks]:
    """Starts the masks of a plan, written over those of an earlier step, which forbid all tokens."""

    def lend(num_entries: int, num_masks: int) -> tuple[Int32Array, Int32Array]:
        words = np.zeros((num_masks, VOCAB_SIZE // MASK_BITS), dtype=np.int32)
        return np.full(num_entries, NO_MASK, dtype=np.int32), words

    def proposed() -> Int32Array:
        assert drafts is not None, "no row with a grammar verifies drafts"
        every = np.zeros((12, 3), dtype=np.int32)
        for row, tokens in drafts.items():
            every[row, : len(tokens)] = tokens
        return every

    return rows.masks(plan, proposed, lend)


def masks_of(rows: GrammarRows, plan: BatchPlan, drafts: dict[int, list[int]] | None = None) -> Masks:
    return start_masks(rows, plan, drafts)()


@pytest.fixture
def rows() -> GrammarRows:
    return GrammarRows(nano_vocabulary)


def test_each_place_of_a_row_has_the_mask_after_the_drafts_before_it_and_other_rows_are_free(rows: GrammarRows) -> None:
    grammar = Grammar.of("choice", '["a taxi, and a table", "a taxi."]')
    text = ids("a taxi")
    admitted(rows, 3, grammar)
    admitted(rows, 5, None)
    admitted(rows, 9, grammar, "a taxi")
    plan = plan_of([3, 5, 7, 9], [2, 1, 0, 0], [True, True, False, True])
    masks, failed = masks_of(rows, plan, {3: [*text[:1], 4000]})
    assert masks is not None and not failed and masks.step_id == 4
    assert masks.entries.reshape(3, 3).tolist() == [[0, 1, NO_MASK], [NO_MASK] * 3, [2, NO_MASK, NO_MASK]], (
        "after a refused draft no draw counts"
    )
    assert text[0] in bits(masks.masks[0])
    assert text[1] in bits(masks.masks[1])
    assert bits(masks.masks[2]) == {ids(", and")[0], ids(".")[0]}
    assert rows.stats() == GrammarStats(masks=3, refused_drafts=1)


def sources_of(rows: GrammarRows) -> dict[int, int]:
    """The number of the compiled matcher that each row has a copy of."""
    return {row: matcher.source.number for row, matcher in rows._matchers.items()}


def test_rows_that_came_in_one_burst_spread_over_several_compiled_ones() -> None:
    """Masks of copies of one are computed one after another."""
    rows, grammar, said = GrammarRows(nano_vocabulary, num_threads=3), GRAMMARS["json"], ids('{"')[:1]
    everything, replies = range(1, 9), {row: np.array(said if row % 2 else [], dtype=np.int32) for row in range(1, 9)}
    for row in everything:
        admitted(rows, row, grammar, nano_tokenizer().decode(replies[row].tolist()))
    first = sources_of(rows)
    assert len(set(first.values())) == 1, "no request waits for another one"
    before, failed = masks_of(rows, plan_of([*everything], [0] * 8))

    def spread() -> bool:
        rows.spread(replies.__getitem__)
        counts = Counter(sources_of(rows).values())
        return len(counts) == 3 and set(counts.values()) == {2, 3}

    wait_until(spread)
    now = sources_of(rows)
    after, failed_after = masks_of(rows, plan_of([*everything], [0] * 8))
    assert before is not None and after is not None and not failed and not failed_after
    assert np.array_equal(before.masks, after.masks), "a row that moves is at the same place"
    rows.spread(replies.__getitem__)
    assert sources_of(rows) == now, "no row moves without a reason"
    for row in everything:
        if now[row] == now[1]:
            rows.release(row)
    rows.spread(replies.__getitem__)
    assert set(Counter(sources_of(rows).values()).values()) <= {1, 2}, "rows move to one that others have left"
    for row in sources_of(rows):
        rows.release(row)
    assert not rows._copies._sources and not rows._copies._source_of and not rows._copies._shared
    rows.close()


def test_rows_move_some_at_a_time_and_not_at_all_after_a_long_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_MOVED", 3)
    monkeypatch.setattr(grammars, "MAX_SHOWN_AGAIN", 2)
    rows, grammar = GrammarRows(nano_vocabulary, num_threads=2), Grammar.of("regex", "(a taxi )*")
    said = np.array((ids("a taxi a taxi a taxi a taxi"))[:4], dtype=np.int32)
    replies = {row: said if row < 4 else said[:2] for row in range(8)}
    for row, reply in replies.items():
        admitted(rows, row, grammar, nano_tokenizer().decode(reply.tolist()))
    first = sources_of(rows)

    def moved() -> list[int]:
        rows.spread(replies.__getitem__)
        return [row for row, source in sources_of(rows).items() if source != first[row]]

    wait_until(lambda: len(moved()) == 1)
    assert [moved() for _ in range(4)] == [[4, 5], [4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7]]
    rows.release(7)
    rows.release(6)
    assert moved() == [4, 5], "those that said more stay"
    rows.close()


def test_not_all_rows_of_a_large_burst_move_after_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_SHOWN_AGAIN", 2)
    rows, nothing = GrammarRows(nano_vocabulary, num_threads=2), np.zeros(0, dtype=np.int32)
    for row in range(10):
        admitted(rows, row, GRAMMARS["json"])
    first = sources_of(rows)

    def num_moved() -> int:
        rows.spread(lambda _: nothing)
        return sum(source != first[row] for row, source in sources_of(rows).items())

    wait_until(lambda: num_moved() > 0)
    assert [num_moved() for _ in range(3)] == [4, 5, 5]
    rows.close()


def test_rows_have_no_copy_of_one_that_could_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: Future[Matcher] = Future()
    failed.set_exception(GrammarLimitError("no memory"))
    monkeypatch.setattr(Compiler, "compile_again", lambda *_: failed)
    rows = GrammarRows(nano_vocabulary, num_threads=2)
    for row in (1, 2, 3):
        admitted(rows, row, GRAMMARS["json"])
        rows.spread(lambda _: np.zeros(0, dtype=np.int32))
    assert {row: number for row, (_, number) in rows._copies._source_of.items()} == {1: 0, 2: 0, 3: 0}
    assert rows._copies._sources[GRAMMARS["json"].digest].compiling[1:] == [failed]
    rows.close()


def test_a_grammar_is_compiled_again_once_no_other_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_AGAIN_S", float("inf"))
    rows, may_compile, compile_one = GrammarRows(nano_vocabulary, num_threads=2), threading.Event(), Vocabulary.compile
    for row in (1, 2):
        admitted(rows, row, GRAMMARS["json"])

    def compile_late(vocabulary: Vocabulary, grammar: Grammar) -> Matcher:
        assert may_compile.wait(PATIENCE_S)
        return compile_one(vocabulary, grammar)

    monkeypatch.setattr(Vocabulary, "compile", compile_late)
    waiting = request(3, GRAMMARS["regex"])
    assert rows.is_awaited(waiting)
    compiling = rows._copies._sources[GRAMMARS["json"].digest].compiling
    rows.spread(lambda _: np.zeros(0, dtype=np.int32))
    assert len(compiling) == 1, "a request would wait for it"
    may_compile.set()
    wait_until(lambda: not rows.is_awaited(waiting))
    rows.spread(lambda _: np.zeros(0, dtype=np.int32))
    assert len(compiling) == 2
    rows.close()


def test_a_grammar_that_takes_long_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_AGAIN_S", -1.0)
    rows = GrammarRows(nano_vocabulary, num_threads=2)
    for row in (1, 2, 3):
        admitted(rows, row, GRAMMARS["json"])
        rows.spread(lambda _: np.zeros(0, dtype=np.int32))
    assert len(rows._copies._sources[GRAMMARS["json"].digest].compiling) == 1
    rows.close()


def test_a_plan_in_which_no_row_with_a_grammar_samples_needs_no_masks(rows: GrammarRows) -> None:
    assert not rows.is_used
    assert rows.advance(np.array([1]), np.array([1]), np.array([[5]])) is None
    admitted(rows, 3, GRAMMARS["json"])
    assert rows.is_used
    assert rows.constrain_any(np.array([4, 3])) and not rows.constrain_any(np.array([4]))
    assert masks_of(rows, plan_of([3, 4], [0, 0], [False, True])) == (None, {})
    rows.release(3)
    assert not rows.is_used


def test_matchers_see_accepted_tokens_alone_and_tell_the_token_that_ends_the_grammar(rows: GrammarRows) -> None:
    text = ids("a taxi")
    for row in (1, 2, 3):
        admitted(rows, row, Grammar.of("choice", '["a taxi"]'))
    width = len(text) + 1
    tokens = np.array([[*text, 50], [*text, 50], [4000] * width, [60] * width], dtype=np.int32)
    counts = np.array([width, len(text) - 1, 0, width], dtype=np.int32)
    ends = rows.advance(np.array([1, 2, 3, 4]), counts, tokens)
    assert ends is not None
    assert ends.tolist() == [len(text) - 1, NO_END, NO_END, NO_END]
    masks, failed = masks_of(rows, plan_of([2, 3], [0, 0]))
    assert masks is not None and not failed
    assert [bits(each) for each in masks.masks] == [{text[-1]}, {text[0]}]


def test_the_place_after_drafts_that_end_the_grammar_is_free(rows: GrammarRows) -> None:
    """Its draw does not count; a mask of an earlier step may leave it no token."""
    drafts = [*ids("a taxi"), 1]  # the last ends the reply
    admitted(rows, 3, Grammar.of("choice", '["a taxi"]'))
    masks, failed = masks_of(rows, plan_of([3], [len(drafts)]), {3: drafts})
    assert masks is not None and not failed
    assert [bits(each) for each in masks.masks] == [*({token} for token in drafts), set(range(VOCAB_SIZE))]


def test_a_matcher_that_fails_frees_its_row_and_fails_its_request(rows: GrammarRows) -> None:
    admitted(rows, 1, Grammar.of("choice", '["a taxi"]'))
    admitted(rows, 2, Grammar.of("choice", '["a taxi"]'))
    rows.advance(np.array([1]), np.array([1]), np.array([[4000]], dtype=np.int32))
    masks, failed = masks_of(rows, plan_of([1, 2], [0, 0]))
    assert masks is not None
    assert masks.entries.tolist() == [NO_MASK, 1]
    assert list(failed) == [1]
    error = failed[1]
    assert isinstance(to_error(error.code, error.message), GrammarLimitError)
    assert "Simplify" in error.message and error.status == 400


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_matcher_that_fails_after_its_request_left_the_row_fails_no_other_request(
    rows: GrammarRows, is_taken: bool
) -> None:
    admitted(rows, 1, Grammar.of("choice", '["a taxi"]'))
    rows.advance(np.array([1]), np.array([1]), np.array([[4000]], dtype=np.int32))
    wait = start_masks(rows, plan_of([1], [0]))
    rows.release(1)
    if is_taken:
        admitted(rows, 1, Grammar.of("choice", '["a taxi"]'))
    masks, failed = wait()
    assert masks is not None and masks.entries.tolist() == [NO_MASK]
    assert not failed


def test_closing_ends_the_threads_of_the_masks() -> None:
    made = GrammarRows(nano_vocabulary)
    made._fillers.submit(int).result()
    (thread,) = made._fillers._threads
    made.close()
    assert not thread.is_alive()


def test_masks_are_being_computed_before_the_caller_goes_on(rows: GrammarRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that plans holds the GIL, without which no thread begins."""
    begun, fill = threading.Event(), grammars._fill

    def begin_late(*arguments: Any) -> None:
        begun.wait(0.05)
        begun.set()
        fill(*arguments)

    monkeypatch.setattr(grammars, "_fill", begin_late)
    admitted(rows, 1, GRAMMARS["json"])
    wait = start_masks(rows, plan_of([1], [0]))
    assert begun.is_set()
    wait()


def test_the_masks_of_rows_without_drafts_do_not_wait_for_those_after_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with drafts takes as long as all its masks together."""
    rows, both = GrammarRows(nano_vocabulary), threading.Barrier(2)
    fill = MatcherThreads.fill

    def at_once(threads: MatcherThreads, jobs: Any, masks: Int32Array) -> None:
        both.wait(PATIENCE_S)
        fill(threads, jobs, masks)

    monkeypatch.setattr(MatcherThreads, "fill", at_once)
    text = ids("quite a table")
    for row in (1, 2):
        admitted(rows, row, Grammar.of("choice", '["quite a table"]'))
    masks, failed = masks_of(rows, plan_of([1, 2], [2, 0]), {1: text[:2]})
    assert masks is not None and not failed
    assert masks.entries.tolist() == [0, 1, 2, 3, NO_MASK, NO_MASK]
    assert [bits(each) for each in masks.masks] == [{text[0]}, {text[1]}, {text[2]}, {text[0]}]
    rows.close()


def test_requests_wait_for_their_grammar_and_no_longer() -> None:
    may_open = threading.Event()

    def open_late() -> Vocabulary:
        may_open.wait(30)
        return nano_vocabulary()

    rows = GrammarRows(open_late)
    waiting, other = request(1, GRAMMARS["regex"]), request(2, None)
    assert rows.is_awaited(waiting) and not rows.is_awaited(other)
    may_open.set()
    while rows.is_awaited(waiting):
        may_open.wait(0.001)
    assert waiting.matcher is not None
    assert not rows.take_errors()


def test_more_waiting_grammars_than_are_kept_are_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_GRAMMARS", 2)
    compiled: list[Grammar] = []

    def compile_one(self: Vocabulary, grammar: Grammar) -> Matcher:
        compiled.append(grammar)
        return real(self, grammar)

    real = Vocabulary.compile
    monkeypatch.setattr(Vocabulary, "compile", compile_one)
    rows = GrammarRows(nano_vocabulary)
    waiting = [request(uid, Grammar.of("regex", f"a{{{uid}}}")) for uid in range(1, 9)]
    for _ in range(50):
        for one in waiting:
            rows.is_awaited(one)
    while any(rows.is_awaited(one) for one in waiting):
        threading.Event().wait(0.001)
    rows.close()
    assert compiled == [one.sampling.grammar for one in waiting]


@pytest.mark.parametrize(("open_vocabulary", "told"), [(nano_vocabulary, "unclosed"), (no_vocabulary, "no tokenizer")])
def test_a_grammar_that_cannot_be_compiled_fails_its_requests(open_vocabulary: object, told: str) -> None:
    rows = GrammarRows(open_vocabulary)  # type: ignore[arg-type]
    one = request(1, Grammar.of("regex", "["))
    errors: list[tuple[Request, object]] = []
    while not errors:
        assert rows.is_awaited(one)
        errors += rows.take_errors()
    ((failed, error),) = errors
    assert failed is one and told in str(error)


def test_the_grammar_used_last_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_GRAMMARS", 2)
    kept, made = Compiler(nano_vocabulary), list[Matcher]()
    for name in ("choice", "regex", "choice", "rules", "choice", "regex"):
        made.append(kept.compile(GRAMMARS[name]).result())
    choice, regex, again, _, third, anew = made
    assert choice is again is third
    assert anew is not regex
    kept.close()


def test_rows_that_move_between_steps_give_the_same_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    advance, num_sources = MatcherThreads.advance, list[int]()

    def compile_again(made: Compiler, _: Matcher, grammar: Grammar, number: int) -> Future[Matcher]:
        compiling = made.compile(grammar, number)
        compiling.exception()  # it is ready at once
        return compiling

    def count(threads: MatcherThreads, matchers: Any) -> Any:
        num_sources.append(len({matcher.source.number for matcher, _ in matchers}))
        return advance(threads, matchers)

    monkeypatch.setattr(Compiler, "compile_again", compile_again)
    monkeypatch.setattr(MatcherThreads, "advance", count)
    with LLM(spec="off", grammar_threads=2, **SETTINGS) as llm:
        each = [SamplingParams(seed=seed, max_tokens=12, grammar=GRAMMARS["json"]) for seed in range(4)]
        alone = [llm.generate("Hello there", one)[0] for one in each]
        assert set(num_sources) == {1}
        together = llm.generate(["Hello there"] * 4, each)
    assert max(num_sources) == 2
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]


def test_a_request_whose_grammar_fails_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cannot be compiled, one goes too far after its first tokens; pages and rows come back."""
    monkeypatch.setattr(BlockingVetting, "check", lambda *_: [])  # which would refuse both
    with LLM(spec="off", **SETTINGS) as llm:
        grammars = [None, Grammar.of("regex", "["), Grammar.of("regex", "(.{1,1000}){1,1000}"), GRAMMARS["choice"]]
        each = [SamplingParams(temperature=0.0, seed=1, max_tokens=30, grammar=grammar) for grammar in grammars]
        alone = [llm.generate("Hello there", one)[0] for one in (each[0], each[3])]
        done = llm.generate(["Hello there"] * 4, each)
        planner = engine_of(llm)._planner
        planner._rows.check()
        assert not planner.has_work and not planner._rows.active.size and not planner.grammars.is_used
    assert [done[0].outputs[0].token_ids, done[3].outputs[0].token_ids] == [one.outputs[0].token_ids for one in alone]
    assert "unclosed" in str(done[1].error)
    assert "cannot be followed" in str(done[2].error)
    assert FinishReason.COMPLETE.text == "stop"
    with pytest.raises(RequestError, match="no tokenizer"):
        no_vocabulary()
