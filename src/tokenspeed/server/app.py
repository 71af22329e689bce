# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: routes, keys, limits, health. Each endpoint is a codec around the same pipeline.

Knows the engine only as a ServedLLM. Importing this loads no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed import __version__
from tokenspeed.chat import parsers
from tokenspeed.core.config import ServerConfig
from tokenspeed.observability.metrics import CONTENT_TYPE, Metrics, PoolSize
from tokenspeed.observability.tracing import Tracer, trace_headers
from tokenspeed.server import (
    anthropic_answers,
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_responses,
    probes,
    responses_answers,
    responses_compact,
    responses_kept,
    tokens,
)
from tokenspeed.server.chat import Conversation
from tokenspeed.server.connection import read_struct, while_connected
from tokenspeed.server.constraints import constrain, needs_constraint
from tokenspeed.server.docs_page import docs_page
from tokenspeed.server.errors import ErrorBody, Failure, HttpError, failure_of
from tokenspeed.server.formats import asks_form
from tokenspeed.server.generation import Job, Origin, new_id
from tokenspeed.server.model_list import list_models, model_headers, show_model
from tokenspeed.server.openapi import Operation, Rules, document
from tokenspeed.server.request_ids import RequestIds
from tokenspeed.server.responses_store import ResponsesStore
from tokenspeed.server.sampling import request_priority
from tokenspeed.server.served import Patience, Served, ServedLLM
from tokenspeed.server.session_list import SessionList
from tokenspeed.server.sessions import hold_for, session_of
from tokenspeed.server.sse import EventStream
from tokenspeed.server.turn import reply_to

Endpoint = Callable[[Served, Request], Awaitable[Response]]
B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/metrics", "/version", "/openapi.json", "/docs"})
_ANTHROPIC_PATH = "/v1/messages"
_CLIENT_GONE = 499
_NO_DIALECT = "none"
_WARNING, _WARNING_CHARS_MAX = "x-tokenspeed-warning", 1024
_TEXT, _OBJECT = "text/plain", "application/json"
_ASKED = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
_log = logging.getLogger(__name__)


class ServerVersion(msgspec.Struct, frozen=True):
    """The answer of /version."""

    version: str


def create_app(
    llm: ServedLLM,
    config: ServerConfig,
    *,
    patience: Patience | None = None,
    tracer: Tracer | None = None,
    store: ResponsesStore | None = None,
) -> Starlette:
    """The ASGI application that serves `llm`. tracer: where spans of its requests go. store: where responses are kept;
    one in memory without it."""
    name = served_name(llm)
    num_blocks = llm.info.num_kv_blocks * llm.config.parallel.dp_attention  # a pool a partition
    pool = PoolSize(num_blocks, llm.info.block_size)
    metrics = Metrics(name, pool, lambda: llm.stats, read_restarts=lambda: llm.num_restarts)
    dialect = _dialect(llm, config)
    served = Served(llm, config, name, metrics, int(time.time()), dialect, patience or Patience(), tracer=tracer)
    middleware = [Middleware(_KeyCheck, api_key=config.api_key)] if config.api_key else []
    if config.cors_origins:
        origins = list(config.cors_origins)
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(RequestIds))
    routes, handlers = _routes(served, store or ResponsesStore()), {HTTPException: _http_exception}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.served = served
    return app


def served_name(llm: ServedLLM) -> str:
    """What the model is called on the wire: for a local file or folder its own name, not where it lies."""
    model = llm.config.model
    if model.served_name:
        return model.served_name
    path = Path(model.model).expanduser()
    return path.name.removesuffix(".gguf") if path.name and path.exists() else model.model


def _dialect(llm: ServedLLM, config: ServerConfig) -> str:
    """The parser of the model's replies: what the operator says, else what its chat template speaks. ConfigError when
    there is no such parser."""
    check_dialect(config)
    if config.tool_call_parser == "auto":
        return parsers.choose(llm.input_processor.template_text or "")
    return config.tool_call_parser


def check_dialect(config: ServerConfig) -> None:
    """ConfigError when there is no parser of the name that the operator says."""
    if config.tool_call_parser != "auto":
        parsers.resolve(config.tool_call_parser)


def _routes(served: Served, store: ResponsesStore) -> list[Route]:
    table: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/chat/completions", _chat_completions),
        ("POST", "/v1/completions", _completions),
        ("POST", "/v1/messages", _messages),
        ("POST", "/v1/messages/count_tokens", _count_tokens),
        ("POST", "/v1/responses", partial(_responses, store)),
        ("POST", "/v1/responses/input_tokens", partial(_input_tokens, store)),
        ("POST", "/v1/responses/compact", partial(_compact, store)),
        ("GET", "/v1/responses/{id}", partial(responses_kept.stored_response, store)),
        ("DELETE", "/v1/responses/{id}", partial(responses_kept.delete_response, store)),
        ("POST", "/v1/responses/{id}/cancel", partial(responses_kept.cancel_response, store)),
        ("GET", "/v1/responses/{id}/input_items", partial(responses_kept.input_items, store)),
        ("GET", "/v1/models", list_models),
        ("GET", "/v1/models/{model:path}", show_model),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/ping", _empty),
        ("GET", "/", _empty),
        ("GET", "/metrics", _metrics),
        ("GET", "/version", _version),
        ("GET", "/sessions", _sessions),
    ]
    table += probes.routes(served.llm)
    table += [("GET", "/docs", _docs), ("GET", "/openapi.json", partial(_openapi, table))]
    return [Route(path, _endpoint(served, handler), methods=[method]) for method, path, handler in table]


def _endpoint(served: Served, handler: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """`handler` with its exceptions turned into answers."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(served, request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 - whatever happens, the client gets an answer
            failure = failure_of(error)
            if failure.is_bug:
                _log.exception("%s %s failed", request.method, request.url.path)
            return _said(failure, request.url.path)

    return endpoint


def _said(failure: Failure, path: str) -> Response:
    """A failure in the shape of the API that the path belongs to."""
    return anthropic_answers.error_response(failure) if path.startswith(_ANTHROPIC_PATH) else failure.response()


def _error_struct(path: str) -> type[msgspec.Struct]:
    """The struct of that shape."""
    return anthropic_answers.ErrorBody if path.startswith(_ANTHROPIC_PATH) else ErrorBody


def _busy_status(path: str) -> int:
    """What that API answers when too many requests wait."""
    return anthropic_answers.OVERLOADED if path.startswith(_ANTHROPIC_PATH) else 429


@Operation(
    "Answer a conversation",
    body=openai_chat.ChatBody,
    answer=openai_chat.Answer,
    events=openai_chat.Chunk,
    example=_ASKED,
).of
async def _chat_completions(served: Served, request: Request) -> Response:
    body = await read_struct(request, openai_chat.ChatBody, served.config.body_bytes_max)
    headers = model_headers(served, body.model)
    conversation = await _held(served, await _read(openai_chat.read_conversation, body, served), headers)
    fields = (body.session_id, body.prompt_cache_key)
    job = _chat_job("chatcmpl", served, request, conversation, session_of(request.headers, fields, conversation))
    headers |= job.origin.headers()
    reply = reply_to(served, conversation)
    headers["x-request-id"] = job.request_id
    if body.stream:
        return EventStream(openai_chat.chunk_frames(served, job, reply, body), served.patience.ping_s, headers)
    answer = await while_connected(request.receive, openai_chat.whole_answer(served, job, reply, body))
    return _json(answer, headers)


@Operation(
    "Answer a conversation in the shape of the Anthropic Messages API",
    body=anthropic_messages.MessagesBody,
    answer=anthropic_answers.Answer,
    events="The named events of the Messages API, message_start to message_stop.",
    example=_ASKED,
).of
async def _messages(served: Served, request: Request) -> Response:
    body = await read_struct(request, anthropic_messages.MessagesBody, served.config.body_bytes_max)
    headers = model_headers(served, body.model)
    conversation = await _held(served, await _read(anthropic_messages.read_conversation, body, served), headers)
    user_id = (body.metadata or {}).get("user_id")
    session = session_of(request.headers, (user_id,), conversation)
    job = _chat_job("msg", served, request, conversation, session, ttls=anthropic_messages.cache_ttls(body))
    headers |= job.origin.headers()
    reply = reply_to(served, conversation)
    headers["request-id"] = job.request_id
    if body.stream:
        frames = anthropic_answers.event_frames(served, job, reply)
        return EventStream(
            frames, served.patience.ping_s, headers, anthropic_answers.error_frame, anthropic_answers.error_response
        )
    answer = await while_connected(request.receive, anthropic_answers.whole_answer(served, job, reply))
    return _json(answer, headers)


@Operation(
    "Count the tokens of a conversation",
    body=anthropic_messages.CountBody,
    answer=anthropic_answers.TokenCount,
    example={"messages": _ASKED["messages"]},
).of
async def _count_tokens(served: Served, request: Request) -> Response:
    body = await read_struct(request, anthropic_messages.CountBody, served.config.body_bytes_max)
    prompt = anthropic_messages.read_conversation(body, served.llm).prompt()
    ids = await asyncio.to_thread(served.llm.input_processor.encode, prompt)
    return _json(anthropic_answers.TokenCount(len(ids)))


@Operation(
    "Make a response",
    body=openai_responses.ResponsesBody,
    answer=responses_answers.Answer,
    events="The named events of the Responses API, response.created to response.completed.",
    example={"input": "Say hello.", "max_output_tokens": 32},
).of
async def _responses(store: ResponsesStore, served: Served, request: Request) -> Response:
    body = await read_struct(request, openai_responses.ResponsesBody, served.config.body_bytes_max)
    headers = model_headers(served, body.model)
    asked = await _read_response(store, served, body)
    asked = dataclasses.replace(asked, conversation=await _held(served, asked.conversation, headers))
    session = session_of(request.headers, (body.session_id, body.prompt_cache_key), asked.conversation)
    job = _chat_job("resp", served, request, asked.conversation, session)
    headers |= job.origin.headers()
    job = dataclasses.replace(job, request_id=job.request_id.replace("-", "_", 1))  # as the ids of this API look
    reply = reply_to(served, asked.conversation)
    headers["x-request-id"] = job.request_id
    answering = responses_answers.Answering(served, job, asked, store)
    if body.stream:
        return EventStream(answering.frames(reply), served.patience.ping_s, headers, answering.error_frame)
    return _json(await while_connected(request.receive, answering.whole(reply)), headers)


@Operation(
    "Count the tokens of a response's input",
    body=openai_responses.ResponsesBody,
    answer=responses_answers.TokenCount,
    example={"input": "Say hello."},
).of
async def _input_tokens(store: ResponsesStore, served: Served, request: Request) -> Response:
    body = await read_struct(request, openai_responses.ResponsesBody, served.config.body_bytes_max)
    prompt = (await _read_response(store, served, body)).conversation.prompt()
    ids = await asyncio.to_thread(served.llm.input_processor.encode, prompt)
    return _json(responses_answers.TokenCount(len(ids)))


@Operation(
    "Make a conversation short: the user's messages, and a summary of the rest",
    body=openai_responses.ResponsesBody,
    answer=responses_compact.Compacted,
    example={"input": "Say hello."},
).of
async def _compact(store: ResponsesStore, served: Served, request: Request) -> Response:
    body = await read_struct(request, openai_responses.ResponsesBody, served.config.body_bytes_max)
    headers = model_headers(served, body.model)
    body = msgspec.structs.replace(body, store=None, tool_choice="none")
    whole = await _read_response(store, served, body)
    asked = responses_compact.asking_for_summary(whole)
    session = session_of(request.headers, (body.session_id, body.prompt_cache_key), whole.conversation)
    job = _chat_job("resp", served, request, asked.conversation, session)
    job = dataclasses.replace(job, request_id=job.request_id.replace("-", "_", 1))
    headers["x-request-id"] = job.request_id
    work = responses_compact.compacted(served, job, asked, reply_to(served, asked.conversation))
    return _json(await while_connected(request.receive, work), headers)


async def _read(read: Callable[[B, ServedLLM], T], body: B, served: Served) -> T:
    """What `read` makes of a body: off the event loop where it asks for a form, whose check may take a while."""
    return await asyncio.to_thread(read, body, served.llm) if asks_form(body) else read(body, served.llm)


async def _read_response(
    store: ResponsesStore, served: Served, body: openai_responses.ResponsesBody
) -> openai_responses.Asked:
    """The same, of the dialect whose store belongs to the event loop."""
    form = None if body.text is None else await asyncio.to_thread(openai_responses.read_form, body.text)
    return openai_responses.read(body, served.llm, store, form)


async def _held(served: Served, conversation: Conversation, headers: dict[str, str]) -> Conversation:
    """With what holds the reply to its form. What of that form is not enforced is said in `headers`."""
    if not needs_constraint(served, conversation):
        return conversation
    conversation, warnings = await asyncio.to_thread(constrain, served, conversation)
    if warnings:
        said = "; ".join([*filter(None, [headers.get(_WARNING)]), *warnings]).encode("ascii", "replace").decode()
        headers[_WARNING] = "".join(character for character in said if character.isprintable())[:_WARNING_CHARS_MAX]
    return conversation


def _chat_job(
    prefix: str,
    served: Served,
    request: Request,
    conversation: Conversation,
    session: str,
    *,
    ttls: Iterable[str | None] = (),
) -> Job:
    """The parser sees the marks of the model's dialect, so they stay in the text unless the request says otherwise."""
    params = conversation.params
    if served.dialect != _NO_DIALECT and params.skip_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    retain, prompt = hold_for(session, conversation, ttls), conversation.prompt()
    trace = {} if served.tracer is None else trace_headers(request.headers)
    origin = Origin(session, served.sessions.compare(session, prompt), trace)
    return Job(new_id(prefix), [prompt], params, conversation.priority, retain, origin)


@Operation(
    "Continue text or token ids",
    body=openai_completions.CompletionBody,
    answer=openai_completions.Answer,
    events=openai_completions.Answer,
    example={"prompt": "Once upon a time", "max_tokens": 16},
).of
async def _completions(served: Served, request: Request) -> Response:
    body = await read_struct(request, openai_completions.CompletionBody, served.config.body_bytes_max)
    headers = model_headers(served, body.model)
    prompts = openai_completions.read_prompts(body)
    params = await _read(openai_completions.read_params, body, served)
    trace = {} if served.tracer is None else trace_headers(request.headers)
    job = Job(new_id("cmpl"), prompts, params, priority=request_priority(body), origin=Origin(trace=trace))
    headers["x-request-id"] = job.request_id
    if body.stream:
        return EventStream(openai_completions.chunk_frames(served, job, body), served.patience.ping_s, headers)
    answer = await while_connected(request.receive, openai_completions.whole_answer(served, job, body))
    return _json(answer, headers)


@Operation(
    "The token ids of text or of a conversation",
    body=tokens.TokenizeBody,
    answer=tokens.TokenizeAnswer,
    example={"prompt": "Say hello."},
).of
async def _tokenize(served: Served, request: Request) -> Response:
    body = await read_struct(request, tokens.TokenizeBody, served.config.body_bytes_max)
    return _json(await tokens.tokenize(served, body))


@Operation(
    "The text of token ids", body=tokens.DetokenizeBody, answer=tokens.DetokenizeAnswer, example={"tokens": [1, 2, 3]}
).of
async def _detokenize(served: Served, request: Request) -> Response:
    body = await read_struct(request, tokens.DetokenizeBody, served.config.body_bytes_max)
    return _json(await tokens.detokenize(served, body))


@Operation("Whether the engine makes progress", answer=_TEXT, failures=(503,)).of
async def _health(served: Served, _: Request) -> Response:
    problem = health_problem(served)
    return Response("" if problem is None else problem, 200 if problem is None else 503, media_type="text/plain")


@Operation("Whether a request would be taken now", answer=_TEXT, failures=(503,)).of
async def _ready(served: Served, _: Request) -> Response:
    problem = health_problem(served)
    if problem is None and served.llm.stats.num_waiting >= served.llm.config.scheduler.max_num_waiting:
        problem = "the waiting queue is full"
    return Response("" if problem is None else problem, 200 if problem is None else 503, media_type="text/plain")


@Operation("Whether the server is there").of
async def _empty(_: Served, __: Request) -> Response:
    return Response()


@Operation("Prometheus metrics", answer=_TEXT).of
async def _metrics(served: Served, _: Request) -> Response:
    return Response(served.metrics.render(), headers={"content-type": CONTENT_TYPE})


@Operation("The sessions that were served lately", answer=SessionList).of
async def _sessions(served: Served, _: Request) -> Response:
    return _json(served.sessions.listing(any_held=served.llm.stats.num_held > 0))


@Operation("The version", answer=ServerVersion).of
async def _version(_: Served, __: Request) -> Response:
    return _json(ServerVersion(__version__))


@Operation("This document", answer=_OBJECT).of
async def _openapi(table: list[tuple[str, str, Endpoint]], served: Served, _: Request) -> Response:
    rules = Rules(_error_struct, _busy_status, _OPEN_PATHS, served.config.api_key is not None)
    made = document(table, rules, __version__)
    return Response(msgspec.json.encode(made), media_type=_OBJECT)


@Operation("The reference as a page that can also ask", answer="text/html").of
async def _docs(_: Served, __: Request) -> Response:
    return docs_page()


def health_problem(served: Served) -> str | None:
    """Why the engine cannot serve; None when it can."""
    llm = served.llm
    if not llm.is_alive:
        return "the engine has ended; it is started again if that can help"
    has_work = (llm.num_live or llm.stats.num_running + llm.stats.num_waiting) > 0
    silent_s = time.monotonic() - llm.last_progress_s
    if has_work and silent_s > served.patience.stall_s:
        return f"the engine has work and made no progress for {silent_s:.0f} s"
    return None


def _json(answer: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


async def _http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses, in the shape of every other error."""
    assert isinstance(error, HTTPException), error
    path, headers = request.url.path, dict(error.headers or {})
    code, what = "not_found", "no such path"
    if error.status_code == 405:
        matching = [route for route in request.app.routes if route.path_regex.match(path)]
        headers["Allow"] = ", ".join(sorted({method for route in matching for method in route.methods}))
        code, what = "method_not_allowed", f"use {headers['Allow'].replace(', ', ' or ')}"
    message = f"{request.method} {path} is not available: {what}"
    response = _said(failure_of(HttpError(error.status_code, message, code=code)), path)
    response.headers.update(headers)
    return response


class _KeyCheck:
    """Asks for the API key on every path but those that probes and scrapers read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        is_open = scope["type"] != "http" or scope["path"] in _OPEN_PATHS
        headers = dict(scope.get("headers", []))
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = headers.get(b"x-api-key") or (bearer if scheme == b"Bearer" else b"")
        if is_open or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
        failure = failure_of(HttpError(401, message, code="invalid_api_key"))
        await _said(failure, scope["path"])(scope, receive, send)
