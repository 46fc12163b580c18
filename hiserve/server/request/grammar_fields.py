"""Fields of requests that constrain the reply: OpenAI's, vLLM's and SGLang's spellings of one grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request

from hiserve.core.request import Grammar, SamplingParams
from hiserve.errors import RequestError
from hiserve.grammar import bounds
from hiserve.grammar.bounds import INVALID
from hiserve.grammar.tools import ToolField, ToolGrammars, ToolSchema
from hiserve.grammar.vet import TOO_COMPLEX, Vetting
from hiserve.server.http.auth import caller_of
from hiserve.server.http.streaming import cancel_on_disconnect
from hiserve.server.request.sampling_fields import SamplingFields
from hiserve.text.abilities import NO_MARKS, ReplyMarks
from hiserve.text.conversation import Conversation

MAKERS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": bounds.json_schema,
    "regex": bounds.regex,
    "choice": bounds.choice,
    "grammar": bounds.rules,
}
MAX_COPIED_CHARS = 16 * 2**20
# ``grammar.bounds`` reads it: msgspec has no union of these.
JsonSchema = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [{"type": "object"}, {"type": "string"}, {"const": True}, {"type": "null"}]})
]
Refused = Annotated[Any, Meta(extra_json_schema={"const": None})]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
NOT_HELD = "the model sees the grammars of these tools, but they are not held"


class Constraint(NamedTuple):
    """A grammar that a request asks for.

    Attributes:
        grammar: Within bounds, and not vetted.
        param: The field that it came in.
        may_relax: Keywords of a JSON schema that no mask can hold may be left out.
        mark: A text to which any reply may come, and after which it is constrained.
        not_held: The constraints of the field that the grammar does not express.
        is_format: It applies to the content alone: a reply that must be calls has none.
        schemas: Of the tools in the grammar.
    """

    grammar: Grammar
    param: str
    may_relax: bool = True
    mark: str = ""
    not_held: Sequence[str] = ()
    is_format: bool = False
    schemas: Sequence[ToolSchema] = ()


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True):
    """``response_format.json_schema``; ``strict`` refuses a schema that cannot be held to the letter."""

    schema: JsonSchema = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def constraints(self) -> list[Constraint]:
        """Returns the requested grammar, if there is one."""
        if self.type == "text":
            return []
        if self.type == "json_object":
            return [Constraint(bounds.any_object(), "response_format", is_format=True)]
        given, param = self.json_schema, "response_format.json_schema"
        if given is None:
            raise RequestError(f"{param} is missing; response_format.type asks for it.", param=param)
        grammar = bounds.json_schema(given.schema, f"{param}.schema")
        return [Constraint(grammar, f"{param}.schema", may_relax=not given.strict, is_format=True)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """``structured_outputs``: one grammar, and the white space of JSON. Fields that would change the reply and are not supported are refused."""

    json: JsonSchema = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Refused = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None

    def __post_init__(self) -> None:
        """Refuses fields without support, and those that exclude each other."""
        refused = {
            "structural_tag": "is not supported; give a schema, a regex or a grammar",
            "disable_additional_properties": "is not supported; set additionalProperties to false in the schema",
        }
        for name, remedy in refused.items():
            if getattr(self, name) not in (None, False):
                raise RequestError(f"structured_outputs.{name} {remedy}.", param=f"structured_outputs.{name}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            param = "structured_outputs.whitespace_pattern"
            raise RequestError(
                f"{param} and structured_outputs.disable_any_whitespace exclude each other. Give one.", param=param
            )

    @property
    def whitespace(self) -> tuple[str, str] | None:
        """The regular expression of the white space between parts of JSON, and its field; None without one."""
        if self.disable_any_whitespace:
            return "", "structured_outputs.disable_any_whitespace"
        pattern = self.whitespace_pattern
        return None if pattern is None else (pattern, "structured_outputs.whitespace_pattern")


class GrammarFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that constrain a reply at all endpoints."""

    regex: str | None = None
    ebnf: str | None = None

    def constraints(self) -> list[Constraint]:
        """Returns the requested grammars.

        Raises:
            RequestError: One is out of bounds.
        """
        return constraints_of("regex", self.regex, "regex") + constraints_of("grammar", self.ebnf, "ebnf")

    @property
    def constraint(self) -> Constraint | None:
        """The one requested grammar, if there is one.

        Raises:
            RequestError: There are two, or it is out of bounds.
        """
        return one_of(self.constraints())


class OpenAIGrammarFields(GrammarFields, frozen=True, kw_only=True):
    """The fields that constrain a reply of ``/v1``."""

    response_format: ResponseFormat | None = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraints(self) -> list[Constraint]:
        """Returns the requested grammars."""
        found = super().constraints()
        if self.response_format is not None:
            found += self.response_format.constraints()
        for kind in MAKERS:
            found += constraints_of(kind, getattr(self, f"guided_{kind}"), f"guided_{kind}")
            found += constraints_of(kind, getattr(self.structured_outputs, kind, None), f"structured_outputs.{kind}")
        if self.structured_outputs is not None and self.structured_outputs.json_object:
            found.append(Constraint(bounds.any_object(), "structured_outputs.json_object"))
        whitespace = None if self.structured_outputs is None else self.structured_outputs.whitespace
        return found if whitespace is None else _spaced(found, *whitespace)


def _spaced(found: Sequence[Constraint], pattern: str, param: str) -> list[Constraint]:
    """Returns grammars with the white space of a pattern between parts of JSON.

    Raises:
        RequestError: None is of JSON, or the pattern is of other texts.
    """
    if not any(each.grammar.kind == "json" for each in found):
        raise RequestError(f"{param} is of JSON, for which the request does not ask. Give a schema too.", param=param)
    return [
        each._replace(grammar=bounds.with_whitespace(each.grammar, pattern, param))
        if each.grammar.kind == "json"
        else each
        for each in found
    ]


def one_of(found: Sequence[Constraint]) -> Constraint | None:
    """Returns the one grammar that a request asks for, if there is one.

    Raises:
        RequestError: There are two.
    """
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(f"{first} and {second} are two grammars for one reply. Give one.", param=second)
    return found[0] if found else None


def constraints_of(kind: str, value: Any, param: str) -> list[Constraint]:
    """Returns the grammar of a field; none for null."""
    return [] if value is None else [Constraint(MAKERS[kind](value, param), param)]


def of_chat(
    constraint: Constraint | None, grammars: ToolGrammars, chat: Conversation, fields: Sequence[ToolField] = ()
) -> Constraint | None:
    """Returns the grammar of the replies to a conversation, if there is one.

    Args:
        constraint: Of the fields of the request. Beside tools, a reply is of its texts, or calls; a format leaves calls that
            must be made as they are.
        grammars: Of tools.
        chat: The conversation.
        fields: As for ``grammar.tools.tools``.

    Raises:
        RequestError: A call is required beside a grammar of the whole reply; or as ``ToolGrammars.of``.
    """
    is_required = chat.choice.is_required
    if is_required and constraint is not None and constraint.is_format:
        constraint = None
    made = grammars.of(chat, None if constraint is None or is_required else constraint.grammar, fields)
    if made is None:
        return constraint
    if constraint is None:
        return Constraint(made.grammar, made.param, mark=made.mark, not_held=made.not_held, schemas=made.schemas)
    if is_required:
        raise RequestError(
            f"{constraint.param} and {made.param} are two grammars for one reply. Give one.", param=made.param
        )
    return constraint._replace(grammar=made.grammar, mark=made.mark, not_held=made.not_held, schemas=made.schemas)


def with_budget(sampling: SamplingParams, marks: ReplyMarks, budget: int | None) -> SamplingParams:
    """Returns the sampling parameters with a limit of the tokens of thoughts; unchanged where nothing exceeds it.

    Args:
        sampling: Fitted to the context.
        marks: As of ``Abilities.marks``, of any text where ``sampling`` has no grammar.
        budget: Most tokens; None is no limit.
    """
    if budget is None or not marks.after or budget >= (sampling.max_tokens or budget + 1):
        return sampling
    grammar = sampling.grammar or Grammar.of("any", "", marks.after, marks.opening)
    return msgspec.structs.replace(sampling, grammar=grammar.within(budget))


async def _check_schemas(vetting: Vetting, request: Request, constraint: Constraint, refusal: RequestError) -> None:
    """Looks in a refused grammar for the tool whose schema is broken, by halves: a tool takes some 20 ms of CPU alone.

    Raises:
        RequestError: One is at fault; the error names it.
    """
    schemas, caller = constraint.schemas, caller_of(request).number
    if refusal.code == bounds.INVALID and schemas:
        while len(schemas) > 1:
            half = len(schemas) // 2
            try:
                checking = vetting.check(_any_of(schemas[:half]), constraint.param, caller=caller)
                await cancel_on_disconnect(request.receive, checking)
                schemas = schemas[half:]
            except RequestError:
                schemas = schemas[:half]
        ((grammar, param),) = schemas
        await cancel_on_disconnect(request.receive, vetting.check(grammar, param, caller=caller))
    elif refusal.code == TOO_COMPLEX and len(schemas) == len(constraint.grammar.alternatives) == 1:
        # Several are not tried: each could end another process.
        ((_, param),) = schemas
        message = refusal.message.replace(constraint.param, param, 1)
        raise RequestError(message, code=refusal.code, param=param) from None


def _any_of(schemas: Sequence[ToolSchema]) -> Grammar:
    """Returns the grammar of the arguments of some tools."""
    first, *others = [schema.grammar for schema in schemas]
    return first.either(*others) if others else first


async def constrain(
    vetting: Vetting,
    request: Request,
    sampling: SamplingParams,
    constraint: Constraint | None,
    num_choices: int,
    marks: ReplyMarks = NO_MARKS,
) -> tuple[SamplingParams, str]:
    """Returns the sampling parameters with the vetted grammar, and a warning of constraints that it does not express; empty for none.

    Args:
        vetting: Vets the grammar.
        request: The request.
        sampling: Without a grammar.
        constraint: The requested one, or None.
        num_choices: Of the whole request; each sends the grammar to its worker.
        marks: As of ``Abilities.marks``; the grammar applies after them.

    Raises:
        RequestError: The grammar cannot be used, or is too large for this number of choices.
        OverloadedError: As ``Vetting.check``.
    """
    if constraint is None:
        return sampling, ""
    given = constraint.grammar
    size = len(given.text) * num_choices
    if size > MAX_COPIED_CHARS:
        raise RequestError(
            f"{constraint.param} has {size} characters for {num_choices} choices in all; the most is {MAX_COPIED_CHARS}. "
            "Ask for fewer choices at once.",
            param=constraint.param,
        )
    checking = vetting.check(
        Grammar.of(given.kind, given.text, marks.after, marks.opening, header=marks.header),
        constraint.param,
        may_relax=constraint.may_relax,
        mark=constraint.mark,
        caller=caller_of(request).number,
    )
    try:
        grammar, warnings = await cancel_on_disconnect(request.receive, checking)
    except RequestError as refusal:
        await _check_schemas(vetting, request, constraint, refusal)
        raise
    warnings = [*constraint.not_held, *warnings]
    # Of a header: ASCII, on one line, and of a length that proxies pass.
    text = " ".join("; ".join(warnings).split()).encode("ascii", "replace").decode()[:400]
    warning = f"{constraint.param} is not held in full: {text}" if text else ""
    return msgspec.structs.replace(sampling, grammar=grammar), warning


async def check_shown(vetting: Vetting, request: Request, shown: Iterable[ToolSchema]) -> None:
    """Checks the grammars that the model only sees; one that takes too long to hold is sound.

    Args:
        vetting: Tries them.
        request: The request; its body must have been read.
        shown: The grammars, as in ``CustomTools.not_held``.

    Raises:
        RequestError: One is no grammar.
        OverloadedError: As ``Vetting.check``.
        ClientDisconnect: The client went away.
    """
    for grammar, param in shown:
        checking = vetting.check(grammar, param, caller=caller_of(request).number)
        try:
            await cancel_on_disconnect(request.receive, checking)
        except RequestError as refusal:
            if refusal.code == INVALID:
                raise
