"""Converts error codes of messages to typed errors."""

from __future__ import annotations

from hiserve.errors import (
    AuthenticationError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    ForbiddenError,
    HiserveError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RequestError,
    ResourceError,
    SlowReaderError,
    TooLargeError,
    UnavailableError,
)

_BY_CODE: dict[str, type[HiserveError]] = {
    kind.code: kind
    for kind in (
        AuthenticationError,
        ConfigError,
        ContextLengthError,
        DeadlineError,
        EngineError,
        ForbiddenError,
        ModelError,
        NotFoundError,
        OverloadedError,
        RequestError,
        ResourceError,
        SlowReaderError,
        TooLargeError,
        UnavailableError,
    )
}


def to_error(code: str, message: str, trace: str = "", *, retry_after_s: int | None = None) -> HiserveError:
    """Returns the error of a code; an ``EngineError`` for a code without a class.

    ``trace``, from the other process, is kept as a note on the error.
    """
    error = _BY_CODE.get(code, EngineError)(message, code=code, retry_after_s=retry_after_s)
    if trace:
        error.add_note(trace)
    return error


def trace_of(error: HiserveError) -> str:
    """Returns the trace of an error that came from another process."""
    return "\n".join(getattr(error, "__notes__", ()))
