"""Requests whose HTTP is broken, unusual or cut short: the bytes that are sent, how the client ends, its answers."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.helpers.bad_requests import MAX_REQUEST_BYTES, Answer, Bad

GOOD_BODY = b'{"prompt":"Hi","max_tokens":2,"temperature":0}'
LONG_BODY = b'{"prompt":"Hi","max_tokens":900,"ignore_eos":true,"stream":true}'
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LAST = LINE + b"connection: close\r\n"
CHUNKED = LAST + b"transfer-encoding: chunked\r\n\r\n"
OFFER = b"connection: close, Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"

OK = Answer(200, "")
NOT_HTTP = Answer(400, "invalid_http")
NOT_JSON = Answer(400, "invalid_json")
LARGE_HEAD = Answer(431, "headers_too_large")
LARGE_BODY = Answer(413, "request_too_large")
NO_METHOD = Answer(405, "method_not_allowed")
NO_ROUTE = Answer(404, "not_found")


class Ending(Enum):
    """What the client does when it has sent everything."""

    STAY = "reads until the server closes"
    HALF = "closes its half; answers that are not there yet may be missing"
    CUT = "resets the connection"


class Wire(NamedTuple):
    """Bytes and their fate.

    Attributes:
        name: What is wrong.
        raw: What is sent.
        answers: All answers, in order.
        ending: Of the client.
    """

    name: str
    raw: bytes
    answers: tuple[Answer, ...]
    ending: Ending = Ending.STAY


def sent(bad: Bad) -> Wire:
    """Returns what a request of sound HTTP looks like on the wire."""
    return Wire(bad.name, bad.raw(), (bad.answer,))


def sized(body: bytes) -> bytes:
    """Returns the end of a head, and the body."""
    return b"content-length: %d\r\n\r\n%b" % (len(body), body)


GOOD = LINE + sized(GOOD_BODY)
GOOD_LAST = LAST + sized(GOOD_BODY)
BAD = LINE + sized(b"{")
BAD_LAST = LAST + sized(b"{")

NOT_REQUESTS = {
    "words": b"hello\r\n\r\n",
    "zeros": b"\x00" * 100,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "HTTP/9.9": b"POST /v1/completions HTTP/9.9\r\n" + sized(b"{"),
    "a method that is none": b"BREW /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "a method in small letters": b"post /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel": b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel to a route": b"CONNECT /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "a space in the address": b"POST /v1/ completions HTTP/1.1\r\nhost: x\r\n" + sized(b"{"),
    "zero in the address": b"POST /v1/\x00 HTTP/1.1\r\nhost: x\r\n" + sized(b"{"),
    "bytes in the address": b"GET /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "no colon in a header": LAST + b"x a\r\n" + sized(b"{"),
    "a space before the colon": LAST + b"x : a\r\n" + sized(b"{"),
    "zero in a header": LAST + b"x: a\x00b\r\n" + sized(b"{"),
    "a folded header": LAST + b"x: a\r\n b\r\n" + sized(b"{"),
    "a bare CR in a header": LAST + b"x: a\rb: c\r\n" + sized(b"{"),
    "bare LFs": b"POST /v1/completions HTTP/1.1\nhost: x\ncontent-length: 1\n\n{",
    "two equal lengths": LAST + b"content-length: 1\r\ncontent-length: 1\r\n\r\n{",
    "two lengths": LAST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{",
    "a list of lengths": LAST + b"content-length: 1, 1\r\n\r\n{",
    "a negative length": LAST + b"content-length: -1\r\n\r\n{",
    "a length with a sign": LAST + b"content-length: +1\r\n\r\n{",
    "a hexadecimal length": LAST + b"content-length: 0x1\r\n\r\n{",
    "an empty length": LAST + b"content-length: \r\n\r\n{",
    "a length over 64 bits": LAST + b"content-length: 99999999999999999999999\r\n\r\n{",
    "length and chunks": LAST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n",
    "chunks and length": LAST + b"transfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n1\r\n{\r\n0\r\n\r\n",
    "an encoding that is not framed": LAST + b"transfer-encoding: gzip\r\n\r\n{",
    "chunked, but not last": LAST + b"transfer-encoding: chunked, identity\r\n\r\n1\r\n{\r\n0\r\n\r\n",
    "a chunk without length": CHUNKED + b"x\r\n{\r\n0\r\n\r\n",
    "a chunk of negative length": CHUNKED + b"-1\r\n{\r\n0\r\n\r\n",
    "a chunk over 64 bits": CHUNKED + b"f" * 17 + b"\r\n{\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    "a body longer than it says": BAD + b"garbage\r\n\r\n",
    "garbage behind a request": GOOD + b"garbage\r\n\r\n",
}
REFUSED: list[tuple[str, bytes, Answer]] = [
    *((name, raw, NOT_HTTP) for name, raw in NOT_REQUESTS.items()),
    ("one endless header", LAST + b"x: " + b"a" * 300_000, LARGE_HEAD),
    ("endless headers", LAST + b"x: aaaaaaaaaaaa\r\n" * 20_000, LARGE_HEAD),
    ("an endless address", b"GET /" + b"a" * 300_000, LARGE_HEAD),
    ("a complete head that is too large", b"GET / HTTP/1.1\r\nx: " + b"a" * 66_000 + b"\r\n\r\n", LARGE_HEAD),
    ("endless trailers", CHUNKED + b"1\r\n{\r\n0\r\n" + b"x: aaaaaaaaaaaa\r\n" * 20_000, LARGE_HEAD),
    ("endless chunk extensions", CHUNKED + b"1;" + b"a" * 300_000, LARGE_HEAD),
    ("a large announced body", LAST + b"content-length: 9999999999\r\n\r\n{", LARGE_BODY),
    ("a larger announced body", LAST + b"content-length: 9223372036854775808\r\n\r\n{", LARGE_BODY),
    ("a large body that is expected", LAST + b"expect: 100-continue\r\ncontent-length: 999999\r\n\r\n", LARGE_BODY),
    ("a large chunk", CHUNKED + b"%x\r\n" % 10**9 + b"x" * (MAX_REQUEST_BYTES + 100_000), LARGE_BODY),
    ("many chunks", CHUNKED + b"400\r\n%b\r\n" % (b" " * 1024) * (MAX_REQUEST_BYTES // 1024 + 10), LARGE_BODY),
    ("a body without length", LAST + b"\r\n" + GOOD_BODY, NOT_JSON),
    ("HTTP/1.0", b"POST /v1/completions HTTP/1.0\r\n" + sized(b"{"), NOT_JSON),
    ("HTTP/1.0 without length", b"POST /v1/completions HTTP/1.0\r\n\r\n{", NOT_JSON),
    ("HTTP/0.9", b"GET /none\r\n\r\n", NO_ROUTE),
    ("no host", b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n" + sized(b"{"), NOT_JSON),
    ("a full address", b"POST http://y/v1/completions HTTP/1.1\r\nconnection: close\r\n" + sized(b"{"), NOT_JSON),
    ("a proxy's address", b"GET http://y/none HTTP/1.1\r\nconnection: close\r\n\r\n", NO_ROUTE),
    ("OPTIONS *", b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", NO_ROUTE),
    ("TRACE", b"TRACE /none HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", NO_ROUTE),
    ("PROPFIND", b"PROPFIND /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", NO_METHOD),
    ("an offer of HTTP/2", LINE + OFFER + sized(b"{"), NOT_JSON),
    ("a web socket", LINE.replace(b"POST", b"GET") + OFFER.replace(b"h2c", b"websocket") + b"\r\n", NO_METHOD),
    ("an expectation that is none", LAST + b"expect: the-moon\r\n" + sized(b"{"), NOT_JSON),
]
SEVERAL = [
    Wire("an offer of HTTP/2 with a good body", LINE + OFFER + sized(GOOD_BODY), (OK,)),
    Wire("two bad ones in one segment", BAD + BAD_LAST, (NOT_JSON, NOT_JSON)),
    Wire("a bad one behind a good one", GOOD + BAD_LAST, (OK, NOT_JSON)),
    Wire("a good one behind a bad one", BAD + GOOD_LAST, (NOT_JSON, OK)),
    Wire("many bad ones in one segment", 200 * BAD + BAD_LAST, 201 * (NOT_JSON,)),
    Wire("empty lines before a request", 4 * b"\r\n" + BAD_LAST, (NOT_JSON,)),
    Wire("a flush with a body that nobody reads", LAST.replace(b"v1/completions", b"flush_cache") + sized(b"{"), (OK,)),
    Wire("one behind the last", BAD_LAST + BAD, (NOT_JSON,)),
]
CUT_SHORT = {
    "nothing": b"",
    "empty lines": b"\r\n\r\n",
    "half a request line": b"POST /v1/comp",
    "half a head": LINE + b"content-le",
    "a head without its body": LINE + b"content-length: 50\r\n\r\n",
    "half a body": LINE + b"content-length: 500\r\n\r\n" + GOOD_BODY,
    "half a large body": LINE + b"content-length: %d\r\n\r\n" % MAX_REQUEST_BYTES + b"x" * 200_000,
    "half a chunk": CHUNKED + b"400\r\n{",
    "a chunk of 60 bits": CHUNKED + b"f" * 15 + b"\r\n{",
    "no last chunk": CHUNKED + b"1\r\n{\r\n",
    "half an expected body": LINE + b"expect: 100-continue\r\ncontent-length: 500\r\n\r\n{",
    "half a request behind a good one": GOOD + LINE,
}
LEFT_ALONE = {
    "a good request": GOOD,
    "a long stream": LINE + sized(LONG_BODY),
    "long streams in one segment": 3 * (LINE + sized(LONG_BODY)),
    "an offer and a long stream": LINE + OFFER.replace(b"close, ", b"") + sized(LONG_BODY),
}


def corpus() -> list[Wire]:
    """Returns all of them."""
    found = [Wire(name, raw, (answer,)) for name, raw, answer in REFUSED] + SEVERAL
    found += [Wire(f"{name}, half closed", raw, (answer,), Ending.HALF) for name, raw, answer in REFUSED]
    for name, raw in (CUT_SHORT | LEFT_ALONE).items():
        answers = (OK,) if name in LEFT_ALONE or raw.startswith(GOOD) else ()
        found.append(Wire(f"{name}, half closed", raw, answers, Ending.HALF))
        found.append(Wire(f"{name}, reset", raw, (), Ending.CUT))
    return found
