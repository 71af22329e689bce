# SPDX-License-Identifier: Apache-2.0
"""Which session a request belongs to, and how long its pages wait for the session's next turn.

Clients say it in many ways, most in headers; one that says nothing is known by how its conversation begins. Knows those
ways; knows no pages and no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from tokenspeed.core.request import Retention
from tokenspeed.server.chat import Conversation

HOLD_S = 300.0
HOLD_MAX_S = 3600.0
_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "x-session-id", "session-id", "x-correlation-id")
_AGENT_HEADER = "x-claude-code-agent-id"
_KEY_CHARS_MAX = 256
_TTL_S = {"5m": 300.0, "1h": 3600.0}


class _UserId(msgspec.Struct):
    """The text of metadata.user_id, where it is an object."""

    session_id: str = ""


def session_of(headers: Mapping[str, str], fields: Iterable[object], conversation: Conversation) -> str:
    """The session's key: what the body names, else a header, else a hash of the tools and of the messages up to the
    first of the user. A client's subagents are sessions of their own."""
    named = [_named_in(field) for field in fields if isinstance(field, str) and field]
    named += [headers[name] for name in _HEADERS if headers.get(name)]
    if not named:
        return f"prefix:{_digest(_beginning(conversation))}"
    agent = headers.get(_AGENT_HEADER, "")
    key = f"{named[0]}/{agent}" if agent else named[0]
    return key if len(key) <= _KEY_CHARS_MAX else f"long:{_digest([key])}"


def hold_for(session: str, conversation: Conversation, ttls: Iterable[str | None] = ()) -> Retention | None:
    """What is asked of the pages of a turn that may end in calls, whose results are the next turn. ttls: of the hints
    that the client gave, the longest counts."""
    if not conversation.callable_tools:
        return None
    hinted = [_TTL_S[ttl] for ttl in ttls if ttl in _TTL_S]
    return Retention(session, min(max(hinted, default=HOLD_S), HOLD_MAX_S))


def _named_in(field: str) -> str:
    """Some clients put their session's id into a JSON object, beside what is not of the session."""
    if not field.startswith("{"):
        return field
    try:
        inner = msgspec.json.decode(field, type=_UserId)
    except msgspec.DecodeError:
        return field
    return inner.session_id or field


def _beginning(conversation: Conversation) -> list[str]:
    texts = [str(tool.get("function")) for tool in conversation.tools]
    for message in conversation.messages:
        texts.append(f"{message.role}:{message.text}")
        if message.role == "user":
            break
    return texts


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
