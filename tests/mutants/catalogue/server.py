"""Guards of the OpenAI routes: what a request may say, its choices, what its client sees."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ANSWER = "hiserve/server/answer.py"
CHAT_SHAPE = "hiserve/server/chat_shape.py"
CHOICES = "hiserve/server/choices.py"
COMPLETION_SHAPE = "hiserve/server/completion_shape.py"
FAILURES = "hiserve/server/failures.py"
FIELDS = "hiserve/server/fields.py"
GATE = "hiserve/server/gate.py"
GENERATION = "hiserve/server/generation.py"
HEALTH = "hiserve/server/health.py"
KNOWN_FIELDS = "hiserve/server/known_fields.py"
LOGPROBS = "hiserve/server/logprobs.py"
OPENAI = "hiserve/server/openai.py"
OPTIONS = "hiserve/server/options.py"
PROMPT_FIELDS = "hiserve/server/prompt_fields.py"
SAMPLING_FIELDS = "hiserve/server/sampling_fields.py"
SHAPES = "hiserve/server/shapes.py"
SSE = "hiserve/server/sse.py"
OF_CHOICES = "tests/unit/server/test_choices.py::"
OF_DISCONNECTS = "tests/unit/server/test_disconnects.py::"
OF_ERRORS = "tests/unit/server/test_errors.py::"
OF_FIELDS = "tests/unit/server/test_fields_over_http.py::"
OF_LOGPROBS = "tests/unit/server/test_logprobs.py::"
OF_METRICS = "tests/unit/server/test_metrics.py::"
OF_REPLIES = "tests/unit/server/test_replies_over_http.py::"

MUTANTS = [
    # --- what a request may say ---
    Mutant(
        name="an unsupported field is ignored",
        file=KNOWN_FIELDS,
        old="if not any(_is_same(value, neutral) for neutral in (None, *REFUSED[name])):",
        new="if False:",
        test=OF_ERRORS + "test_what_is_not_built_is_never_silently_ignored",
    ),
    Mutant(
        name="an unknown field passes a strict server",
        file=KNOWN_FIELDS,
        old="elif is_strict:",
        new="elif False:",
        test=OF_ERRORS + "test_strict_fields_refuses_what_no_table_knows",
    ),
    Mutant(
        name="a reply may exceed the context",
        file=OPTIONS,
        old="if wanted > room:",
        new="if False:",
        test=OF_ERRORS + "test_a_limit_that_does_not_fit_says_what_would",
    ),
    Mutant(
        name="the default limit may lie below min_tokens",
        file=OPTIONS,
        old="max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens)",
        new="DEFAULT_COMPLETION_TOKENS",
        test=OF_FIELDS + "test_a_default_limit_leaves_room_for_min_tokens",
    ),
    Mutant(
        name="best_of is ignored",
        file=OPTIONS,
        old="if best_of not in (None, sampling.n):",
        new="if False:",
        test=OF_ERRORS + "test_a_bad_field_is_a_400_that_names_it",
    ),
    Mutant(
        name="a token id beyond the vocabulary is served",
        file="hiserve/text/bodies.py",
        old="if low < 0 or high >= vocab_size:",
        new="if False:",
        test=OF_ERRORS + "test_a_bad_prompt_is_a_400",
    ),
    Mutant(
        name="a request may have choices without end",
        file=PROMPT_FIELDS,
        old="if len(prompts) * num_per_prompt > MAX_CHOICES:",
        new="if False:",
        test=OF_CHOICES + "test_the_most_choices_are_served",
    ),
    Mutant(
        name="a bias may name unknown tokens",
        file=SAMPLING_FIELDS,
        old="sampling.check_vocabulary(vocab_size)",
        new="pass",
        test=OF_ERRORS + "test_a_bad_field_is_a_400_that_names_it",
    ),
    Mutant(
        name="a model's own temperature is ignored",
        file=SAMPLING_FIELDS,
        old='fields.number("temperature", defaults.temperature)',
        new='fields.number("temperature", 1.0)',
        test=OF_FIELDS + "test_the_models_own_defaults_fill_what_a_request_leaves_out",
    ),
    Mutant(
        name="a token id may be spelled anyhow",
        file=FIELDS,
        old="_TOKEN_ID.fullmatch(token)",
        new="token.isdigit()",
        test=OF_ERRORS + "test_a_bad_field_is_a_400_that_names_it",
    ),
    Mutant(
        name="add_special_tokens is ignored",
        file=OPENAI,
        old="add_special_tokens=options.add_special_tokens",
        new="add_special_tokens=True",
        test=OF_LOGPROBS + "test_a_start_token_that_the_client_did_not_send_is_scored_but_not_shown",
    ),
    Mutant(
        name="truncate_prompt_tokens is ignored",
        file=OPENAI,
        old="prompts.append(truncated(prompt, options.truncate_prompt_tokens, max_model_len))",
        new="prompts.append(prompt)",
        test=OF_FIELDS + "test_the_end_of_a_prompt_is_kept",
    ),
    # --- choices ---
    Mutant(
        name="every choice draws a seed of its own",
        file=CHOICES,
        old="first = msgspec.structs.replace(sampling.seeded(), n=1)",
        new="first = msgspec.structs.replace(sampling, n=1)",
        test=OF_CHOICES + "test_each_choice_is_an_engine_request_with_its_index_and_one_common_seed",
    ),
    Mutant(
        name="every choice of a request scores the prompt",
        file=CHOICES,
        old="[msgspec.structs.replace(first, prompt_logprobs=None)]",
        new="[first]",
        test=OF_LOGPROBS + "test_one_choice_of_a_prompt_scores_it_for_all",
    ),
    Mutant(
        name="a choice shows a prompt before it is scored",
        file=GENERATION,
        old="                        await self.scorer._is_scored.wait()\n",
        new="",
        test=OF_LOGPROBS + "test_one_choice_of_a_prompt_scores_it_for_all",
    ),
    Mutant(
        name="a slow reader does not hold its choices up",
        file=CHOICES,
        old="asyncio.Queue(MAX_WAITING)",
        new="asyncio.Queue()",
        test=OF_CHOICES + "test_a_reader_that_stands_still_holds_its_choices_up",
    ),
    Mutant(
        name="all choices run at once, however many",
        file=CHOICES,
        old="async with places, aclosing(stream):",
        new="async with aclosing(stream):",
        test=OF_CHOICES + "test_merging_opens_a_bounded_number_of_streams",
    ),
    Mutant(
        name="an error of one choice leaves the others running",
        file=CHOICES,
        old="            task.cancel()\n",
        new="            pass\n",
        test=OF_CHOICES + "test_an_error_of_one_choice_ends_them_all",
    ),
    Mutant(
        name="every choice counts the prompt",
        file=CHOICES,
        old="self._firsts = generations[::num_per_prompt]",
        new="self._firsts = generations",
        test=OF_CHOICES + "test_a_whole_reply_has_all_choices_in_order_and_counts_the_prompt_once",
    ),
    Mutant(
        name="a stop text leaves the request in the engine",
        file=GENERATION,
        old="                            await deltas.aclose()\n",
        new="                            pass\n",
        test=OF_FIELDS + "test_the_request_is_aborted_before_the_client_takes_the_last_event",
    ),
    Mutant(
        name="every prompt's choices draw from other numbers than alone",
        file=GENERATION,
        old="choice=self._seat",
        new="choice=self.choice",
        test=OF_CHOICES + "test_several_prompts_are_answered_prompt_by_prompt",
    ),
    Mutant(
        name="scores behind a stop text are shown",
        file=GENERATION,
        old="tokens, scores = tokens[:num_tokens], scores[: num_tokens * self._num_score_bytes]",
        new="tokens = tokens[:num_tokens]",
        test=OF_LOGPROBS + "test_tokens_behind_a_stop_text_have_no_scores",
    ),
    Mutant(
        name="news without anything to show is a piece",
        file=GENERATION,
        old="if piece.tokens or piece.text or piece.finish:",
        new="if True:",
        test=OF_LOGPROBS + "test_an_echo_begins_with_the_prompt_and_its_scores",
    ),
    Mutant(
        name="max_tokens 0 generates",
        file=GENERATION,
        old="if not self._keeps_tokens:",
        new="if False:",
        test=OF_LOGPROBS + "test_max_tokens_0_scores_the_prompt_alone",
    ),
    # --- what a client sees ---
    Mutant(
        name="of two tokens that read alike the last is shown",
        file=LOGPROBS,
        old="shown.setdefault(token_text(self._spell(token)), logprob)",
        new="shown[token_text(self._spell(token))] = logprob",
        test=OF_LOGPROBS + "test_of_two_tokens_that_read_the_same_the_likelier_is_shown",
    ),
    Mutant(
        name="minus infinity breaks the JSON",
        file=LOGPROBS,
        old="logprobs = scores.logprobs.clip(min=LEAST_LOGPROB).tolist()",
        new="logprobs = scores.logprobs.tolist()",
        test=OF_LOGPROBS + "test_minus_infinity_is_a_number_of_json",
    ),
    Mutant(
        name="half a character is a token's text",
        file=LOGPROBS,
        old='    except UnicodeDecodeError:\n        return "bytes:" + "".join(f"\\\\x{byte:02x}" for byte in spelled)',
        new='    except UnicodeDecodeError:\n        return spelled.decode(errors="replace")',
        test=OF_LOGPROBS + "test_a_chat_choice_has_one_entry_a_token",
    ),
    Mutant(
        name="prompt tokens without a score are shown",
        file=LOGPROBS,
        old="tokens = generation.prompt[: 1 + num_known].tolist()",
        new="tokens = generation.prompt.tolist()",
        test=OF_LOGPROBS + "test_a_reply_aborted_before_its_prompt_was_computed_shows_what_is_known",
    ),
    Mutant(
        name="an echo shows more likeliest tokens than asked for",
        file=LOGPROBS,
        old="*scored.top[: self._num_top]",
        new="*scored.top",
        test=OF_LOGPROBS + "test_an_echo_with_fewer_scores_than_the_prompts_shows_as_many_as_were_asked_for",
    ),
    Mutant(
        name="an echo is decoded from tokens",
        file=COMPLETION_SHAPE,
        old="text = decoded if given is None else given",
        new="text = given or ''",
        test=OF_LOGPROBS + "test_an_echo_of_a_text_is_that_text_to_the_letter",
    ),
    Mutant(
        name="a completion hides tokens without text",
        file=COMPLETION_SHAPE,
        old="is_shown = piece.text or piece.finish or self._options.has_token_ids or self._num_top is not None",
        new="is_shown = piece.text or piece.finish",
        test=OF_LOGPROBS + "test_tokens_without_a_text_of_their_own_still_have_a_chunk_with_their_scores",
    ),
    Mutant(
        name="an echo's offsets count a hidden start token",
        file=COMPLETION_SHAPE,
        old="offset = len(text) - len(decoded)",
        new="offset = 0",
        test=OF_LOGPROBS + "test_a_start_token_that_the_client_did_not_send_is_scored_but_not_shown",
    ),
    Mutant(
        name="a chat hides scores of tokens without text",
        file=CHAT_SHAPE,
        old="if not (piece.text or piece.finish or self._shows_tokens):",
        new="if not (piece.text or piece.finish):",
        test=OF_LOGPROBS + "test_tokens_without_a_text_of_their_own_still_have_a_chunk_with_their_scores",
    ),
    Mutant(
        name="usage hides the cached tokens",
        file=SHAPES,
        old='"cached_tokens": cached.num_tokens',
        new='"cached_tokens": 0',
        test=OF_REPLIES + "test_a_whole_chat_reply",
    ),
    Mutant(
        name="a stream ends without its last event",
        file=ANSWER,
        old='if options.has_usage else b"") + DONE',
        new='if options.has_usage else b"")',
        test=OF_REPLIES + "test_a_streamed_chat_reply",
    ),
    Mutant(
        name="large replies are worded in the loop",
        file=ANSWER,
        old="if choices.is_large:",
        new="if False:",
        test="tests/unit/server/test_large_replies.py::test_the_scores_of_a_long_prompt_are_worded_in_a_thread",
    ),
    Mutant(
        name="a reply shows the scores of prompts without end",
        file="hiserve/server/logprobs.py",
        old="if number > MAX_PROMPT_SCORES:",
        new="if False:",
        test="tests/unit/server/test_large_replies.py::test_the_scores_of_prompts_in_a_reply_are_bounded",
    ),
    Mutant(
        name="every piece opens its choice",
        file=ANSWER,
        old="generation = unopened.pop(piece.choice, None)",
        new="generation = unopened[piece.choice]",
        test=OF_CHOICES + "test_streamed_choices_each_have_an_opening_and_one_finish",
    ),
    Mutant(
        name="an error is not nested",
        file=FAILURES,
        old='msgspec.json.encode({"error": error})',
        new="msgspec.json.encode(error)",
        test=OF_ERRORS + "test_unknown_routes_and_methods_have_the_same_shape",
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
        old='return None if self._engine.is_ready else self._engine.trouble or "the engine is not running"',
        new="return None",
        test=OF_ERRORS + "test_readiness_follows_the_engine",
    ),
    Mutant(
        name="metrics refuse HEAD",
        file=HEALTH,
        old='"/metrics", self.metrics, methods=["GET", "HEAD"]',
        new='"/metrics", self.metrics, methods=["GET"]',
        test=OF_METRICS + "test_metrics_answer_get_and_head",
    ),
]
