# SPDX-License-Identifier: Apache-2.0
"""What a caller may ask of a request's life: how soon it runs, how long it may take, and how long its pages wait for
the next turn.

Every value is honoured or refused with the field's name, never ignored. Knows no engine and no wire dialect.
"""

from __future__ import annotations

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import PRIORITY_ABS_MAX, Retention

SECONDS_MAX = 7 * 24 * 3600.0
SESSION_CHARS_MAX = 512


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
    checked_priority(retain.priority, "retain.priority")
    checked_seconds(retain.ttl_s, "retain.ttl_s")
    return retain


def checked_priority(priority: int, param: str) -> int:
    """A priority class, or InvalidRequestError naming the field."""
    if not -PRIORITY_ABS_MAX <= priority <= PRIORITY_ABS_MAX:
        raise InvalidRequestError(
            f"{param} is {priority}; it must be from {-PRIORITY_ABS_MAX} to {PRIORITY_ABS_MAX}", param
        )
    return priority


def checked_seconds(seconds: float, param: str) -> float:
    """A duration above 0, or InvalidRequestError naming the field."""
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0.0 < seconds <= SECONDS_MAX:
        raise InvalidRequestError(
            f"{param} is {seconds!r}; it must be a number of seconds above 0 and at most {SECONDS_MAX:.0f}", param
        )
    return float(seconds)
