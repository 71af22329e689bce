# SPDX-License-Identifier: Apache-2.0
"""What a caller may ask of a request's life: how long it may take, and how long its pages wait for the next turn.

Every value is honoured or refused with the field's name, never ignored. Knows no engine and no wire dialect.
"""

from __future__ import annotations

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import Retention

SECONDS_MAX = 7 * 24 * 3600.0
SESSION_CHARS_MAX = 512
_PRIORITY_MIN, _PRIORITY_MAX = -(2**31), 2**31 - 1


def checked_retention(retain: Retention) -> Retention:
    """`retain` with exact types, or InvalidRequestError naming the field."""
    try:
        retain = msgspec.convert(msgspec.structs.asdict(retain), Retention)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequestError(f"retain: {str(error).partition(' - at ')[0]}", "retain") from None
    if not 0 < len(retain.session) <= SESSION_CHARS_MAX:
        raise InvalidRequestError(
            f"retain: the session's name has {len(retain.session)} characters; it must have 1 to {SESSION_CHARS_MAX}",
            "retain",
        )
    if not _PRIORITY_MIN <= retain.priority <= _PRIORITY_MAX:
        raise InvalidRequestError(
            f"retain: priority is {retain.priority}; it must be from {_PRIORITY_MIN} to {_PRIORITY_MAX}", "retain"
        )
    checked_seconds(retain.ttl_s, "retain.ttl_s")
    return retain


def checked_seconds(seconds: float, param: str) -> float:
    """A duration above 0, or InvalidRequestError naming the field."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0.0 < seconds <= SECONDS_MAX:
        raise InvalidRequestError(
            f"{param} is {seconds!r}; it must be a number of seconds above 0 and at most {SECONDS_MAX:.0f}", param
        )
    return float(seconds)
