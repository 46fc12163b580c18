"""Every exception hiserve raises on purpose.

HiserveError                 base: fact, limit and remedy in one message
├── ConfigError              a flag, a file or a combination of them is wrong      (exit code 1)
├── ModelError               the model's folder, architecture or weights are wrong (exit code 1)
├── ResourceError            the machine cannot hold what was asked for            (exit code 1)
├── RequestError             the caller's request is wrong                         (HTTP 400)
│   ├── ContextLengthError   prompt, or prompt plus max_tokens, exceeds the context
│   ├── NotFoundError        no such model or route                                (HTTP 404)
│   ├── TooLargeError        the body exceeds the limit                            (HTTP 413)
│   ├── AuthenticationError  no key, or one that is not known                      (HTTP 401)
│   ├── ForbiddenError       the key may not do this                               (HTTP 403)
│   ├── GrammarLimitError    the reply's grammar cannot be followed any further
│   └── SlowReaderError      too much of a stream was not read                     (in the stream)
├── OverloadedError          the queue is full                                     (HTTP 429)
├── UnavailableError         starting, draining or without a worker                (HTTP 503)
├── DeadlineError            the request waited longer than it may                 (HTTP 503)
└── EngineError              the engine failed this request                        (HTTP 500)
InvariantError               our own fault: state that must never exist (not a HiserveError)
"""

from __future__ import annotations


class HiserveError(Exception):
    """Base of every error a caller can act on.

    Args:
        message: Fact, limit and remedy, in one or two sentences.
        code: Stable machine-readable name, as OpenAI's ``error.code``.
        param: The request field or flag at fault, if one is.
        retry_after_s: Seconds until a retry can succeed; None if that is unknown.
    """

    status = 500
    code = "internal_error"

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.retry_after_s = retry_after_s


class ConfigError(HiserveError):
    """A flag, a configuration file or a combination of settings is wrong."""

    code = "invalid_configuration"


class ModelError(HiserveError):
    """The model's folder, architecture, tokenizer or weights cannot be used."""

    code = "invalid_model"


class ResourceError(HiserveError):
    """The machine lacks the memory, the port or the device that was asked for."""

    code = "insufficient_resources"


class RequestError(HiserveError):
    """The caller's request is malformed or asks for something unsupported."""

    status = 400
    code = "invalid_request"


class ContextLengthError(RequestError):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"

    @classmethod
    def of(cls, size: str, max_tokens: int, param: str) -> ContextLengthError:
        """Returns the error in the words by which clients know it.

        Args:
            size: Of the prompt, with its unit.
            max_tokens: Context length.
            param: The field that has the prompt.
        """
        return cls(
            f"the prompt is too long: it has {size}; this model's maximum context length is {max_tokens} tokens, reply "
            "included. Shorten the prompt.",
            param=param,
        )


class NotFoundError(RequestError):
    """The model or the route does not exist."""

    status = 404
    code = "model_not_found"


class TooLargeError(RequestError):
    """The body of the request exceeds the server's limit."""

    status = 413
    code = "request_too_large"


class AuthenticationError(RequestError):
    """The request has no API key, or one that the server does not know."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The API key is known but may not do this."""

    status = 403
    code = "forbidden"


class SlowReaderError(RequestError):
    """The caller left more of its stream unread than is kept for it."""

    code = "slow_reader"


class GrammarLimitError(RequestError):
    """The grammar of a reply became too complex for its next token."""

    code = "grammar_limit"


class OverloadedError(HiserveError):
    """The queue is full; the caller should retry later."""

    status = 429
    code = "overloaded"


class UnavailableError(HiserveError):
    """The server is starting, draining or has no live worker."""

    status = 503
    code = "unavailable"


class DeadlineError(HiserveError):
    """The request waited in the queue longer than it may."""

    status = 503
    code = "queue_timeout"


class EngineError(HiserveError):
    """The engine failed this request through no fault of the caller."""

    status = 500
    code = "engine_error"


class InvariantError(Exception):
    """Internal state that must never exist; the process must not go on."""


_BY_CODE: dict[str, type[HiserveError]] = {
    kind.code: kind
    for kind in tuple(globals().values())
    if isinstance(kind, type) and issubclass(kind, HiserveError) and kind is not HiserveError
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
