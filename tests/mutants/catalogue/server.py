"""Guards of text handling and of the HTTP server."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHAT = "hiserve/text/chat.py"
DETOKENIZER = "hiserve/text/detokenizer.py"
REPLIES = "hiserve/text/replies.py"
ADMIN = "hiserve/server/admin.py"
FAILURES = "hiserve/server/failures.py"
FIELDS = "hiserve/server/fields.py"
GATE = "hiserve/server/gate.py"
GENERATION = "hiserve/server/generation.py"
OPENAI = "hiserve/server/openai.py"
SHAPES = "hiserve/server/shapes.py"
SSE = "hiserve/server/sse.py"
OF_CHAT = "tests/unit/text/test_chat.py::"
OF_DETOKENIZER = "tests/unit/text/test_detokenizer.py::"
OF_REPLIES = "tests/unit/text/test_replies.py::"
OF_ADMIN = "tests/unit/server/test_admin.py::"
OF_DISCONNECTS = "tests/unit/server/test_disconnects.py::"
OF_ERRORS = "tests/unit/server/test_errors.py::"
OF_HTTP = "tests/unit/server/test_replies_over_http.py::"

MUTANTS = [
    # --- tokens to text ---
    Mutant(
        name="half a character is shown",
        file=DETOKENIZER,
        old='self._decoder.decode(b"".join([pieces[i] for i in ids if i < len(pieces)]))',
        new='b"".join([pieces[i] for i in ids if i < len(pieces)]).decode(errors="replace")',
        test=OF_DETOKENIZER + "test_a_split_character_is_held_back_until_it_is_complete",
    ),
    Mutant(
        name="an unfinished character is lost at the end",
        file=DETOKENIZER,
        old='self._decoder.decode(b"", final=True)',
        new='""',
        test=OF_DETOKENIZER + "test_an_unfinished_character_appears_at_the_end_only",
    ),
    Mutant(
        name="a finished reply is not flushed",
        file=GENERATION,
        old="            text += self._detokenizer.flush()\n",
        new="            pass\n",
        test=OF_HTTP + "test_a_reply_cut_inside_a_character_ends_with_a_replacement",
    ),
    # --- replies keep their tokens ---
    Mutant(
        name="ids are spliced whatever they decode to",
        file=REPLIES,
        old="tokenizer.decode(ids, skip_hidden=False) == content",
        new="True",
        test=OF_REPLIES + "test_ids_that_decode_to_another_text_are_not_used",
    ),
    Mutant(
        name="a reply is known by its words alone",
        file=REPLIES,
        old='digest = namespace_digest(digest, message["role"], message["content"])',
        new='digest = namespace_digest(namespace, message["role"], message["content"])',
        test=OF_REPLIES + "test_another_conversation_does_not_see_the_reply",
    ),
    Mutant(
        name="a reply is known in every namespace",
        file=REPLIES,
        old="    digest = namespace\n",
        new='    digest = b""\n',
        test=OF_REPLIES + "test_namespaces_do_not_see_each_other",
    ),
    Mutant(
        name="replies are kept without end",
        file=REPLIES,
        old="len(self._ids) > self._max_entries or ",
        new="",
        test=OF_REPLIES + "test_the_memory_is_bounded_by_entries_and_drops_the_least_recently_used",
    ),
    # --- what a request may say ---
    Mutant(
        name="a lone surrogate is taken for text",
        file=CHAT,
        old="        text.encode()\n",
        new='        text.encode("utf-8", "replace")\n',
        test=OF_CHAT + "test_only_lone_surrogates_are_invalid_text",
    ),
    Mutant(
        name="a token id beyond the vocabulary is served",
        file=FIELDS,
        old="if low < 0 or high >= vocab_size:",
        new="if low < 0 or high > vocab_size:",
        test=OF_ERRORS + "test_a_bad_prompt_is_a_400",
    ),
    Mutant(
        name="a reply may exceed the context",
        file=OPENAI,
        old="max_tokens is not None and max_tokens > room",
        new="max_tokens is not None and max_tokens > max_model_len",
        test=OF_ERRORS + "test_a_limit_that_does_not_fit_says_what_would",
    ),
    Mutant(
        name="an unsupported field is ignored",
        file=FIELDS,
        old="if value is not None and not any(",
        new="if value is not None and not neutral and not any(",
        test=OF_ERRORS + "test_what_is_not_built_is_never_silently_ignored",
    ),
    # --- what a client sees ---
    Mutant(
        name="an error is not nested",
        file=FAILURES,
        old='msgspec.json.encode({"error": error})',
        new="msgspec.json.encode(error)",
        test=OF_ERRORS + "test_unknown_routes_and_methods_have_the_same_shape",
    ),
    Mutant(
        name="usage hides the cached tokens",
        file=SHAPES,
        old='{"cached_tokens": generation.num_cached}',
        new='{"cached_tokens": 0}',
        test=OF_HTTP + "test_a_whole_chat_reply",
    ),
    Mutant(
        name="a stream ends without its last event",
        file=OPENAI,
        old='(event(shape.closing(generation)) if options.has_usage else b"") + DONE',
        new='event(shape.closing(generation)) if options.has_usage else b""',
        test=OF_HTTP + "test_a_streamed_chat_reply",
    ),
    Mutant(
        name="a request goes on when its client has gone",
        file=SSE,
        old="            raise ClientDisconnect\n",
        new="            await asyncio.wait(tasks[:1])\n",
        test=OF_DISCONNECTS + "test_a_closed_socket_aborts_the_request",
    ),
    # --- what the operator sees ---
    Mutant(
        name="a request ends twice in the counters",
        file=GENERATION,
        old="        if self._meter.e2e_s is not None:\n            return\n        self._meter.ended(reason)\n",
        new="        self._meter.e2e_s = None\n        self._meter.ended(reason)\n",
        test=OF_DISCONNECTS + "test_counters_add_up_over_a_mixture_of_ends",
    ),
    Mutant(
        name="an engine that is not running counts as ready",
        file=GATE,
        old='return None if self._engine.is_ready else "the engine is not running"',
        new="return None",
        test=OF_ERRORS + "test_readiness_follows_the_engine",
    ),
    Mutant(
        name="metrics refuse HEAD",
        file=ADMIN,
        old='"/metrics", self.metrics, methods=["GET", "HEAD"]',
        new='"/metrics", self.metrics, methods=["GET"]',
        test=OF_ADMIN + "test_metrics_answer_get_and_head",
    ),
]
