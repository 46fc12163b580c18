"""JSON from clients: its size, its texts, and its fields as typed values; errors name the field."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from hiserve.errors import RequestError

Schema = dict[str, Any]
T = TypeVar("T", bound=msgspec.Struct)

# Of an object that a client passes through to the template, and of the arguments of all tool calls together.
MAX_DEPTH = 32
MAX_VALUES = 32_768
MAX_INT = 2**63 - 1
REF = "#/components/schemas/{name}"

# Fields whose entries are named one by one in errors.
_INDEXED = ("input", "messages", "system", "tools")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile("^Object missing required field `(.+?)`")
_UNKNOWN = re.compile("^Object contains unknown field `(.+?)`(?: - at `|$)", re.DOTALL)


def decode(body: dict[str, Any], kind: type[T]) -> T:
    """Returns the fields of a type from a parsed body; other fields of the body are ignored.

    Raises:
        RequestError: A field has another type, or is out of its range; ``param`` names it.
    """
    given = {name: body[name] for name in kind.__struct_fields__ if name in body}
    for name, value in given.items():
        if isinstance(value, str):
            check_text(value, name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _fault(str(error), given, kind) from None
    except UnicodeEncodeError:
        schema, schemas = components(kind)
        paths = (_invalid_text(value, _inner(schema, name, schemas), schemas, name) for name, value in given.items())
        param = next((path for path in paths if path is not None), None)
        raise RequestError(f"{param or 'a text'} is not valid Unicode: it has a lone surrogate.", param=param) from None


def check_text(text: str, param: str) -> None:
    """Refuses lone surrogates, which JSON can spell but UTF-8 cannot.

    Raises:
        RequestError: The text has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} is not valid Unicode: a lone surrogate at character {error.start}.", param=param
        ) from None


def check_json(value: Any, param: str, max_values: int = MAX_VALUES) -> None:
    """Refuses parsed JSON that is too large or too deep for a template or a grammar.

    Raises:
        RequestError: The value is nested too deeply, has too many values, a text in it is not valid Unicode, or a whole
            number has more than 64 bits.
    """
    level, num_values = [value], 0
    for _ in range(MAX_DEPTH):
        num_values += len(level)
        if num_values > max_values:
            raise RequestError(f"{param} has more than {max_values} values.", param=param)
        for entry in level:
            if isinstance(entry, str):
                check_text(entry, param)
            elif isinstance(entry, int) and abs(entry) > MAX_INT:
                raise RequestError(f"{param} has a whole number of more than 64 bits.", param=param)
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [entry for part in inner for entry in part]
        level += [entry for part in inner if isinstance(part, dict) for entry in part.values()]
        if not level:
            return
    raise RequestError(f"{param} is nested more than {MAX_DEPTH} levels deep.", param=param)


def bare(raw: bytes) -> bytes:
    """Returns the part of a JSON text outside its strings, in linear time for any input."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    return b"".join(plain.split(b'"')[::2])


def num_separators(text: str) -> int:
    """Returns the number of commas and opening brackets outside of strings: at least the number of values less one."""
    raw = bare(text.encode("utf-8", "surrogatepass"))
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def forms(schema: Schema, schemas: dict[str, Schema]) -> list[Schema]:
    """Returns the alternatives of a schema, nested ones included, references resolved, null excluded."""
    if "$ref" in schema:
        return forms(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    inner = [form for word in ("anyOf", "oneOf") for each in schema.get(word, ()) for form in forms(each, schemas)]
    return inner or ([] if schema.get("type") == "null" else [schema])


def allowed_values(schema: Schema, schemas: dict[str, Schema]) -> str:
    """Returns the values that a schema allows, in English: "a number between 0 and 1". Null is not mentioned."""
    if "title" in schema and "properties" not in schema:  # a named value, and no type
        return str(schema["title"])
    words = dict.fromkeys(_words(form, schemas) for form in forms(schema, schemas))
    return " or ".join(words) or "null"


def _words(form: Schema, schemas: dict[str, Schema]) -> str:
    kind, values = form.get("type"), form.get("enum", [form["const"]] if "const" in form else [])
    note = f" ({form['description']})" if kind in ("number", "object") and "description" in form else ""
    if values:
        named = [json.dumps(value) for value in values if value is not None]
        return ("one of " if len(named) > 1 else "") + (", ".join(named) or "null")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(form) + note
    if kind == "string":
        return "a string" + _size(form, "Length", "characters")
    if kind == "array":
        return "a list" + _size(form, "Items", "entries", f"each {allowed_values(form.get('items', {}), schemas)}")
    if kind == "object":
        if isinstance(each := form.get("additionalProperties"), dict):
            return "an object" + _size(form, "Properties", "entries", f"each {allowed_values(each, schemas)}") + note
        names = form.get("properties", ()) if each is False else form.get("required", ())
        return "an object" + (f" with {', '.join(names)}" if names else "")
    return "true or false" if kind == "boolean" else "any value"


def _range(form: Schema) -> str:
    least, most = form.get("minimum"), form.get("maximum")
    if least is not None and most is not None:
        return f" between {least:.17g} and {most:.17g}" if isinstance(least, float) else f" between {least} and {most}"
    if "exclusiveMinimum" in form and most is not None:
        return f" above {form['exclusiveMinimum']:g} and at most {most:g}"
    return "" if least is None else f" of at least {least}"


def _size(form: Schema, word: str, unit: str, *more: str) -> str:
    least, most = form.get(f"min{word}", 0), form.get(f"max{word}")
    if most is None:
        said = ["that is not empty"] * (least > 0)
    else:
        said = [f"of {least} to {most} {unit}" if least else f"of at most {most} {unit}"]
    return (" " * bool(said) + ", ".join([*said, *more])) if said else "".join(f", {each}" for each in more)


def union(title: str, *kinds: Any) -> msgspec.Meta:
    """Returns the schema of a value of one of several types, for a field that msgspec does not convert."""
    schemas, _ = msgspec.json.schema_components(kinds, ref_template=REF)
    return msgspec.Meta(title=title, extra_json_schema={"anyOf": list(schemas)})


@cache
def components(kind: type[msgspec.Struct]) -> tuple[Schema, dict[str, Schema]]:
    """Returns the JSON schema of a type, and the schemas of the types within it by name."""
    (schema,), schemas = msgspec.json.schema_components([kind], ref_template=REF)
    return schema, schemas


def _fault(message: str, given: dict[str, Any], kind: type[msgspec.Struct]) -> RequestError:
    """Converts msgspec's error to one that names the field and its allowed values."""
    where = message.rpartition("`$")[2] if "`$" in message else ""
    missing = _MISSING.match(message)
    steps: list[str | int] = [name or int(index) for name, index in _STEP.findall(where)]
    steps += [missing[1]] if missing else []
    if steps[0] not in _INDEXED:
        steps = [step for step in steps if isinstance(step, str)]
    schema, schemas = components(kind)
    for step in steps:
        schema = _inner(schema, step, schemas)
    typed = [form for form in forms(schema, schemas) if "type" in form.get("properties", ())]
    if steps[0] in _INDEXED and isinstance(steps[-1], int) and typed:
        steps.append("type")  # an entry is something else than the object of a certain type
        schema = {"anyOf": [form["properties"]["type"] for form in typed]}
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:]
    fact = f"is {number}; it " if (number := _number_at(given, steps)) is not None else ""
    fault = f"{fact}must be {allowed_values(schema, schemas)}."
    if unknown := _UNKNOWN.match(message):
        fault = f"has a field {unknown[1][:100]!a}, which is not known; it {fault}"
    return RequestError(f"{param} {fault}", param=param)


def _number_at(given: Any, steps: list[str | int]) -> int | float | None:
    """Returns the number at a path; None for another type or a number of too many digits."""
    for step in steps:
        given = given.get(step) if isinstance(given, dict) else None
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return given if is_number and not abs(given) > MAX_INT + 1 else None


def _inner(schema: Schema, step: str | int, schemas: dict[str, Schema]) -> Schema:
    """Returns the schema of a field, or of a list's entries. A field name applied to a list refers to its entries."""
    for form in forms(schema, schemas):
        if isinstance(step, int) and "items" in form:
            return dict(form["items"])
        if form.get("type") == "array":
            return _inner(form["items"], step, schemas)
    found = [form["properties"][step] for form in forms(schema, schemas) if step in form.get("properties", ())]
    if found:
        return dict(found[0]) if len(found) == 1 else {"anyOf": found}
    raise AssertionError(f"{step} is not in {schema}")


def _invalid_text(value: Any, schema: Schema, schemas: dict[str, Schema], where: str) -> str | None:
    """Returns the path of the first text that a type reads and that is not valid Unicode, or of the object with such a name.

    Values that the type does not read are skipped: their depth and size are the client's choice.
    """
    if isinstance(value, str):
        return None if _is_unicode(value) else where
    inner = forms(schema, schemas)
    if isinstance(value, list):
        items: Schema = next((form["items"] for form in inner if "items" in form), {})
        is_indexed = where in _INDEXED
        paths = (
            _invalid_text(each, items, schemas, f"{where}[{i}]" if is_indexed else where)
            for i, each in enumerate(value)
        )
        return next((path for path in paths if path is not None), None)
    if isinstance(value, dict):
        fields = {name: each for form in inner for name, each in form.get("properties", {}).items()}
        for name, entry in value.items():
            if not _is_unicode(name):
                return where
            if name in fields and (path := _invalid_text(entry, fields[name], schemas, f"{where}.{name}")) is not None:
                return path
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
