"""The files of a batch in OpenAI's form: requests, one a line; results, and errors of lines that have none."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from hiserve.errors import ConfigError, HiserveError, RequestError, ResourceError, TooLargeError
from hiserve.text.body.json import check_text

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_ID_CHARS = 512
ENVELOPE_BYTES = 2**16  # of a line beyond its body
RESULT_START = b'{"id":"batch_req_'


class BatchRequest(NamedTuple):
    """The request of one line; its body is not parsed."""

    custom_id: str
    url: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Streamed(msgspec.Struct):
    stream: Any = None


class _Reply(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Fault(msgspec.Struct):
    code: str
    message: str


class _Result(msgspec.Struct):
    """A line of the output or of the errors; its first bytes are ``RESULT_START``."""

    id: str
    custom_id: str | None
    response: _Reply | None
    error: _Fault | None


class _Done(msgspec.Struct):
    custom_id: str
    response: msgspec.Raw


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields each line that is not blank with its number, from 1; None for one that is longer than ``max_bytes``."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)
            yield number, None
        elif line := line.strip():
            yield number, line


def read_request(line: bytes | None) -> tuple[str | None, BatchRequest | RequestError]:
    """Returns the ``custom_id`` of a line, if it has one, and its request, or what is wrong with it.

    Args:
        line: As ``read_lines`` yields it.
    """
    custom_id = None
    try:
        found = _read(line)
        custom_id = _custom_id(found.custom_id)
        return custom_id, _request(custom_id, found)
    except RequestError as error:
        return custom_id, error


def _read(line: bytes | None) -> _Line:
    if line is None:
        raise TooLargeError("the line is larger than --max-request-bytes allows. Send less, or raise it.")
    try:
        with contextlib.suppress(msgspec.DecodeError, UnicodeError):
            return msgspec.json.decode(line, type=_Line)
        fields = json.loads(line)  # takes NaN and lone surrogates, of which the server says what is wrong
        if not isinstance(fields, dict):
            raise ValueError("it is none")
        if "body" in fields:
            fields["body"] = msgspec.Raw(json.dumps(fields["body"]).encode())
        return _Line(**{name: value for name, value in fields.items() if name in _Line.__struct_fields__})
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not a JSON object with custom_id, method, url and body: {error}.") from None


def _custom_id(given: Any) -> str:
    if not isinstance(given, str) or not 1 <= len(given) <= MAX_ID_CHARS:
        raise RequestError(f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters.", param="custom_id")
    check_text(given, "custom_id")
    return given


def _request(custom_id: str, line: _Line) -> BatchRequest:
    if line.method != "POST":
        raise RequestError("method must be POST.", param="method")
    if line.url not in URLS:
        raise RequestError(f"url must be one of {', '.join(URLS)}.", param="url")
    body = bytes(line.body)
    if not body:
        raise RequestError("the line has no body.", param="body")
    if _streams(body):
        raise RequestError("replies of a batch are whole; leave stream out of the body.", param="stream")
    return BatchRequest(custom_id, line.url, body)


def _streams(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Streamed).stream is True
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False  # the server says what is wrong with it


class Results:
    """The output and the errors of a batch; a context manager.

    The output has replies alone, and is continued: a line that was cut when a former run was killed is taken off. The
    errors are those of this run, because a line that failed is tried again by the next.

    Args:
        output: Results of earlier runs, or no file.
        errors: Written anew; there is none where no line failed.

    Raises:
        ConfigError: A file cannot be written, another batch writes it, or the output has other lines than results.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self._paths = output, errors
        self._known: set[bytes] = set()  # digests of each custom_id that this run has seen
        self.num_done = 0
        self.num_failed = 0
        with contextlib.ExitStack() as undo:
            self._output = undo.enter_context(_open(output, "output"))
            if not output.is_file():
                raise ConfigError(f"{output} is no file. Give an --output that can be read again.", param="output")
            self._done = _read_done(output)  # digests of each custom_id that the output has
            self._errors = undo.enter_context(_open(errors, "errors"))
            if errors.is_file():
                self._errors.truncate(0)
            self._undo = undo.pop_all()

    def has(self, custom_id: str) -> bool:
        """Whether the output has had the reply since before this run."""
        return _digest(custom_id) in self._done

    def is_new(self, custom_id: str) -> bool:
        """Whether no line before had this ``custom_id``."""
        digest, before = _digest(custom_id), len(self._known)
        self._known.add(digest)
        return len(self._known) > before

    def add_reply(self, custom_id: str, status: int, request_id: str, body: bytes) -> None:
        """Writes the reply to a request: to the errors, where its status is one.

        Raises:
            ResourceError: The disk does not take it.
        """
        self._write(custom_id, _Reply(status, request_id, msgspec.Raw(body)), None)

    def add_fault(self, custom_id: str | None, number: int, error: HiserveError) -> None:
        """Writes what is wrong with line ``number``; raises as ``add_reply``."""
        self._write(custom_id, None, _Fault(error.code, f"line {number}: {error.message}"))

    def _write(self, custom_id: str | None, reply: _Reply | None, fault: _Fault | None) -> None:
        is_good = reply is not None and reply.status_code < 400
        result = _Result(f"batch_req_{secrets.token_hex(12)}", custom_id, reply, fault)
        line = msgspec.json.encode(result) + b"\n"
        file = self._output if is_good else self._errors
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            raise ResourceError(
                f"cannot write {self._paths[not is_good]}: {error.strerror}. The same command continues the batch."
            ) from None
        self.num_done += is_good
        self.num_failed += not is_good

    def __enter__(self) -> Results:
        """Starts a ``with`` block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the files."""
        self._undo.close()
        errors = self._paths[1]
        if not self.num_failed and errors.is_file() and not errors.is_symlink():
            errors.unlink()


def _open(path: Path, param: Literal["output", "errors"]) -> FileIO:
    """Opens a file at its end, and locks it."""
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.", param=param) from None
    try:
        if path.is_file():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"another batch writes {path}. Give another --{param}.", param=param) from None
    return file


def _read_done(output: Path) -> set[bytes]:
    """Returns the digest of each ``custom_id`` of an output, and takes off a last line that is not whole."""
    done, end = set(), 0
    with output.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") and line[: len(RESULT_START)] == RESULT_START[: len(line)]:
                os.truncate(output, end)
                break
            try:
                done.add(_digest(msgspec.json.decode(line, type=_Done).custom_id))
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                raise ConfigError(
                    f"{output} has lines that are no results of a batch. Give another --output.", param="output"
                ) from None
            end += len(line)
    return done


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
