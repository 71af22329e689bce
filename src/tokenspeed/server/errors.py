# SPDX-License-Identifier: Apache-2.0
"""Errors as HTTP answers in the OpenAI shape. Knows no endpoint."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

import msgspec
from starlette.responses import Response

from tokenspeed.core.errors import EngineDeadError, OverloadedError, RequestError


class HttpError(Exception):
    """A refusal that only HTTP knows: size, key, path, model name."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class GenerationError(Exception):
    """The engine ended this one request with a fault."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object of an OpenAI error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """An OpenAI error."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Failure:
    """What an exception becomes. is_bug: nobody raised it on purpose, so it deserves a traceback in the log. error: the
    exception itself, for dialects that say it in other words."""

    status: int
    body: ErrorBody
    headers: dict[str, str] = field(default_factory=dict)
    is_bug: bool = False
    error: BaseException | None = None

    def response(self) -> Response:
        """The HTTP answer."""
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, {"content-type": "application/json", **self.headers})


def failure_of(error: BaseException) -> Failure:
    """Status, body and headers for any exception."""
    return dataclasses.replace(_classified(error), error=error)


def _classified(error: BaseException) -> Failure:
    match error:
        case RequestError():
            return _failure(400, str(error), "invalid_request_error", error.param, error.code)
        case OverloadedError():
            headers = {"retry-after": str(error.retry_after_s)}
            return _failure(429, str(error), "rate_limit_error", None, "overloaded", headers)
        case EngineDeadError():
            again = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
            message = f"{error}; send the request again" if again else str(error)
            return _failure(503, message, "server_error", None, "engine_dead", again)
        case GenerationError():
            return _failure(500, str(error), "server_error", None, "generation_failed")
        case HttpError():
            return _failure(error.status, str(error), "invalid_request_error", error.param, error.code)
        case _:
            failure = _failure(500, "internal error; see the server's log", "server_error", None, "internal_error")
            return Failure(failure.status, failure.body, is_bug=True)


def decode_failure(error: msgspec.DecodeError) -> HttpError:
    """A body that is no JSON, or whose JSON has a wrong type somewhere."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return HttpError(400, f"the request body is not valid JSON: {text}", code="invalid_json", param="body")
    message, _, path = text.partition(" - at `$")
    param = path.rstrip("`").removeprefix(".")
    missing = re.search(r"missing required field `([^`]+)`", message)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
    param = param or "body"
    return HttpError(400, f"{param}: {message[:1].lower()}{message[1:]}", code="invalid_type", param=param)


def _failure(  # noqa: PLR0917
    status: int, message: str, kind: str, param: str | None, code: str, headers: dict[str, str] | None = None
) -> Failure:
    return Failure(status, ErrorBody(ErrorDetail(_printable(message), kind, param, code)), headers or {})


def _printable(message: str) -> str:
    """What it quotes of a request may hold anything; a terminal or a log shall not be steered by it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)
