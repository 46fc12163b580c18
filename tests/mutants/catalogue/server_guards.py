"""Guards of the server around the OpenAI routes: keys, limits, connections, health, metrics, native endpoint."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

S = "hiserve/server/"
T = "tests/unit/server/"
AUTH, CONNECTION, LIMITS, HEALTH = S + "auth.py", S + "connection.py", S + "limits.py", S + "health.py"
METRICS, ALIASES, APP, FAILURES = S + "metrics.py", S + "aliases.py", S + "app.py", S + "failures.py"
ADMIN, NATIVE, SHAPE, SERVE = S + "admin.py", S + "native_fields.py", S + "native_shape.py", "hiserve/commands/serve.py"

MUTANTS = [
    Mutant(
        name="an unknown path needs no key",
        file=AUTH,
        old='is_public = scope["path"] in PUBLIC_PATHS',
        new='is_public = not scope["path"].startswith("/v1")',
        test=T + "test_auth.py::test_without_a_known_key_nothing_is_served",
    ),
    Mutant(
        name="keys are compared byte by byte",
        file=AUTH,
        old="[hmac.compare_digest(digest, key) for key in self._keys]",
        new="[digest == key for key in self._keys]",
        test=T + "test_auth.py::test_the_keys_are_compared_in_constant_time_and_always_all",
    ),
    Mutant(
        name="any key is an admin's where there is no admin key",
        file=AUTH,
        old="return caller_of(request).is_admin or (self._admin_key is None and not self._keys)",
        new="return caller_of(request).is_admin or self._admin_key is None",
        test=T + "test_auth.py::test_what_affects_all_tenants_needs_the_admin_key",
    ),
    Mutant(
        name="a salt alone makes the namespace",
        file=AUTH,
        old='namespace_digest("tenant", tenant, cache_salt or "")',
        new='namespace_digest("tenant", cache_salt or tenant)',
        test=T + "test_auth.py::test_each_key_has_a_namespace_and_a_salt_only_narrows_it",
    ),
    Mutant(
        name="tenants share although they were not told to",
        file=AUTH,
        old='tenant = b"" if self._shares_prefixes else digest',
        new='tenant = b""',
        test=T + "test_auth.py::test_each_key_has_a_namespace_and_a_salt_only_narrows_it",
    ),
    Mutant(
        name="a caller ends anyone's requests",
        file=ADMIN,
        old="self._auth.tags(rid) if self._auth.is_admin(request) else [tag_of(request, rid)]",
        new="self._auth.tags(rid)",
        test=T + "test_auth.py::test_a_caller_ends_his_own_requests_and_the_admin_anyones",
    ),
    Mutant(
        name="server information shows the keys",
        file=ADMIN,
        old="without_secrets(self._resolved.config)",
        new="self._resolved.config",
        test=T + "test_auth.py::test_server_info_shows_no_secret",
    ),
    Mutant(
        name="only an announced length is limited",
        file=LIMITS,
        old="            self._check(num_bytes)\n",
        new="            pass\n",
        test=T + "test_limits.py::test_a_longer_body_is_refused_where_it_exceeds_the_limit",
    ),
    Mutant(
        name="an announced length is not looked at",
        file=LIMITS,
        old="            self._check(int(announced))\n",
        new="            pass\n",
        test=T + "test_limits.py::test_an_announced_length_over_the_limit_is_refused_unread",
    ),
    Mutant(
        name="a head may grow without end",
        file=CONNECTION,
        old="        self._num_idle_bytes += len(data)\n",
        new="",
        test=T + "test_connection.py::test_a_head_without_end_is_a_431",
    ),
    Mutant(
        name="trailers are taken for headers",
        file=CONNECTION,
        old="        if self._is_in_head:\n            super().on_header(name, value)\n",
        new="        super().on_header(name, value)\n",
        test=T + "test_connection.py::test_trailers_are_not_headers",
    ),
    Mutant(
        name="a client that does not read keeps its connection",
        file=SERVE,
        old="        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT_S * 1000)\n",
        new="",
        test=T + "test_connection.py::test_a_client_that_stops_reading_loses_its_connection",
    ),
    Mutant(
        name="an unhandled failure has no request id",
        file=APP,
        old="await failure_response(error)(scope, receive, send_with_id)",
        new="await failure_response(error)(scope, receive, send)",
        test=T + "test_envelope.py",
    ),
    Mutant(
        name="a poisoned request is repeated",
        file=FAILURES,
        old='    500: {"x-should-retry": "false"},\n',
        new="",
        test=T + "test_envelope.py",
    ),
    Mutant(
        name="a busy engine is ill",
        file=HEALTH,
        old="tasks = asyncio.create_task(self._probe(engine)), asyncio.create_task(self._progress())",
        new="tasks = asyncio.create_task(self._probe(engine)), asyncio.create_task(self._probe(engine))",
        test=T + "test_health.py",
    ),
    Mutant(
        name="what a client sent becomes a label",
        file=APP,
        old='getattr(scope.get("route"), "path", NO_ROUTE)',
        new='scope["path"]',
        test=T + "test_metrics.py::test_responses_are_counted_by_route_and_status_never_by_what_was_sent",
    ),
    Mutant(
        name="an alias forgets to sum",
        file=ALIASES,
        old="values.get(key, 0.0) + sample.value",
        new="sample.value",
        test=T + "test_metrics.py::test_other_names_show_the_same_values",
    ),
    Mutant(
        name="events of the native stream are pieces",
        file=SHAPE,
        old="        self._text += piece.text\n",
        new="        self._text = piece.text\n",
        test=T + "test_native.py::test_every_event_of_a_stream_holds_everything_so_far",
    ),
    Mutant(
        name="each native event words the logprobs of the input again",
        file=SHAPE,
        old="self._input = self._input or self._input_logprobs(",
        new="self._input = self._input_logprobs(",
        test=T + "test_native.py::test_the_logprobs_of_the_input_are_worded_once_a_choice",
    ),
    Mutant(
        name="a native default longer than the context is refused",
        file=NATIVE,
        old="num_new = 0 if asked.is_default_length else sampling.max_tokens or 0",
        new="num_new = sampling.max_tokens or 0",
        test=T + "test_native.py::test_what_does_not_fit_the_context_is_refused",
    ),
    Mutant(
        name="the schema promises what is refused",
        file=S + "request_schemas.py",
        old='"integer" if is_whole else "number", "minimum": least, "maximum": most}',
        new='"integer" if is_whole else "number", "minimum": least, "maximum": 2 * most}',
        test=T + "test_schema.py::test_the_described_limits_are_those_that_are_checked",
    ),
]
