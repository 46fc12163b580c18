"""``hiserve generate``: a batch of prompts from files or standard input, one JSON line out for each; or OpenAI's batch file."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

import hiserve
from hiserve.commands.progress import progress
from hiserve.config.flags import flag_of
from hiserve.config.options import Options, flat
from hiserve.core.request import SamplingParams
from hiserve.errors import ConfigError, HiserveError, RequestError

STDIN = "-"
CONTENTS = ("prompt", "messages", "token_ids")
SAMPLING_FLAGS: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
    "n": int,
}


class InputLine(NamedTuple):
    """One line of input.

    Attributes:
        text: As it was read, without its end.
        is_json: It holds a JSON object; otherwise it is a prompt itself.
    """

    text: str
    is_json: bool


def add_arguments(parser: argparse.ArgumentParser, add_settings: Callable[..., None]) -> None:
    """Adds the command's own arguments, then the settings of the engine, without those of a server that listens."""
    parser.add_argument(
        "--input",
        action="append",
        metavar="FILE",
        help="Prompts, one a line: a .jsonl file has objects with prompt, messages or token_ids and sampling fields, "
        "any other file has texts; - is standard input, of objects or texts (default: -). May be given several times.",
    )
    parser.add_argument("--output", metavar="FILE", help="Where the JSON lines go (default: standard output).")
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="Instead of prompts, OpenAI's batch file: lines with custom_id, method, url and body. Replies go to --output as they "
        "end; a second run answers the lines that have none there.",
    )
    parser.add_argument(
        "--errors", metavar="FILE", help="Where lines of --batch go that failed (default: OUTPUT.errors.jsonl)."
    )
    for name, kind in SAMPLING_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar="N", help=f"{name} of lines that do not say.")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="Stop text of lines that do not say.")
    add_settings(parser, is_http=False)


def run(
    config: Options,
    input: list[str] | None,
    output: str | None,
    batch: str | None = None,
    errors: str | None = None,
    **sampling: Any,
) -> int:
    """Generates for every line and writes the results in the same order; those of ``batch`` as they end.

    Returns:
        The exit status: 1 when a line was refused or failed; its result has the error.

    Raises:
        ConfigError: A file cannot be read or written, a sampling flag is out of range, or flags exclude each other.
        HiserveError: The engine cannot be started, or has failed.
    """
    if batch is not None:
        others = {"input": input, **sampling}
        if given := [flag_of(name) for name, value in others.items() if value is not None]:
            raise ConfigError(f"{given[0]} is not for --batch: its lines say all of that.", param="batch")
        answered: int = importlib.import_module("hiserve.commands.batch").run(config, batch, output, errors)
        return answered
    if errors is not None:
        raise ConfigError("--errors is for --batch; other results have their errors themselves.", param="errors")
    sources = input or [STDIN]
    has_stdin = STDIN in sources
    lines = [line for source in sources for line in (() if source == STDIN else _read_file(source))]
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(_open_output(output))
        llm = stack.enter_context(hiserve.LLM(**flat(config)))
        prompts = PromptBatch(llm, {name: value for name, value in sampling.items() if value is not None})
        begin = stack.enter_context(progress("prompts"))
        advance = begin(None if has_stdin else len(lines))
        num_done, num_tokens, begin_s = 0, 0, time.perf_counter()
        try:
            for result in prompts.run(_with_stdin(lines) if has_stdin else lines):
                out.write(json.dumps(result, ensure_ascii=False) + "\n")
                out.flush()
                num_done += 1
                num_tokens += sum(len(choice["token_ids"]) for choice in result.get("choices", ()))
                advance(f"{num_tokens / (time.perf_counter() - begin_s):,.0f} tokens/s")
        except KeyboardInterrupt:
            sys.stderr.write(f"stopped early: {num_done:,} results were written\n")
            raise
    return int(prompts.num_refused > 0)


class PromptBatch:
    """Turns lines into requests and outputs into results.

    Args:
        llm: The engine.
        sampling: Fields of ``SamplingParams`` for lines that do not say, over the model's defaults.

    Attributes:
        num_refused: Lines that were refused or failed.

    Raises:
        ConfigError: A sampling field is out of range.
    """

    def __init__(self, llm: Any, sampling: dict[str, Any]) -> None:
        self._llm = llm
        self._defaults = msgspec.to_builtins(llm.default_sampling) | sampling
        self.num_refused = 0
        try:
            _sampling(self._defaults)
        except RequestError as error:
            raise ConfigError(error.message, param=error.param) from None

    def run(self, lines: Iterable[InputLine]) -> Iterator[dict[str, Any]]:
        """Yields one result per line, in order: choices, or the error that refused it.

        Times of a choice count from the moment at which its line was read.
        """
        heads: deque[dict[str, Any]] = deque()
        read_s: deque[float] = deque()

        def requests() -> Iterator[tuple[list[int], SamplingParams]]:
            for index, line in enumerate(lines):
                head: dict[str, Any] = {"index": index}
                try:
                    tokens, sampling = self._parse(line, head)
                except RequestError as error:
                    self.num_refused += 1
                    head["error"] = _shown(error)
                    heads.append(head)
                else:
                    heads.append(head)
                    read_s.append(time.perf_counter())
                    yield tokens, sampling

        for output in self._llm.generate_each(requests()):
            while "error" in heads[0]:
                yield heads.popleft()
            yield heads.popleft() | self._result(output, read_s.popleft())
        yield from heads

    def _result(self, output: Any, read_s: float) -> dict[str, Any]:
        if output.error is not None:
            self.num_refused += 1
            return {"error": _shown(output.error)}
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "choices": [_choice(choice, read_s) for choice in output.outputs],
        }

    def _parse(self, line: InputLine, head: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        """Returns the tokens and the sampling of a line; its ``id`` goes into ``head``.

        Raises:
            RequestError: The line is malformed, or does not fit the context.
        """
        fields = _parse_object(line.text) if line.is_json else {"prompt": line.text}
        if "id" in fields:
            head["id"] = fields.pop("id")
        contents = [name for name in CONTENTS if name in fields]
        if len(contents) != 1:
            raise RequestError(f"a line needs one of {', '.join(CONTENTS)}; this one has {len(contents)} of them.")
        kind, content = contents[0], fields.pop(contents[0])
        sampling = _sampling(self._defaults | fields)
        if kind == "messages":
            return self._llm.encode_chat(content), sampling
        if not isinstance(content, str if kind == "prompt" else list):
            wanted = "a text" if kind == "prompt" else "a list of token ids"
            raise RequestError(f"{kind} must be {wanted}.", param=kind)
        return self._llm.encode(content), sampling


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling fields: {error}.") from None


def _shown(error: HiserveError) -> dict[str, Any]:
    return {"message": error.message, "param": error.param, "code": error.code}


def _choice(choice: Any, read_s: float) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(choice)
    del shown["drafts"]
    if choice.logprobs is None:
        del shown["logprobs"]
    times = {name: round(shown[name] - read_s, 6) for name in ("first_token_s", "end_s")}
    return shown | times | ({} if choice.drafts is None else {"spec_tokens_details": choice.drafts.shown()})


def _parse_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise RequestError("the line is not a JSON object.")
    return found


def _read_file(name: str) -> list[InputLine]:
    try:
        texts = Path(name).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --input {name}: {error}.", param="input") from None
    return [InputLine(text, name.endswith(".jsonl")) for text in texts if text.strip()]


def _with_stdin(lines: list[InputLine]) -> Iterator[InputLine]:
    """Yields lines of files, then those of standard input as they come; one that opens with ``{`` is an object."""
    yield from lines
    for text in sys.stdin:
        if text.strip():
            yield InputLine(text.rstrip("\r\n"), text.lstrip().startswith("{"))


@contextlib.contextmanager
def _open_output(name: str | None) -> Iterator[TextIO]:
    if name is None:
        yield sys.stdout
        return
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(f"cannot write --output {name}: {error.strerror}.", param="output") from None
    with file:
        yield file
