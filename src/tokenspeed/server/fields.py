# SPDX-License-Identifier: Apache-2.0
"""What the API's document says of a field's values beyond its type. Describes only: a value is checked where it is
read, with a message that names the field.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


def within(low: float, high: float) -> msgspec.Meta:
    """Numbers from low to high."""
    return msgspec.Meta(extra_json_schema={"minimum": low, "maximum": high})


def above(low: float, high: float) -> msgspec.Meta:
    """Numbers above low and at most high."""
    return msgspec.Meta(extra_json_schema={"exclusiveMinimum": low, "maximum": high})


def one_of(*values: object) -> msgspec.Meta:
    """These and no others."""
    return msgspec.Meta(extra_json_schema={"enum": list(values)})


def at_least_one() -> msgspec.Meta:
    """Text or a list that is not empty."""
    return msgspec.Meta(extra_json_schema={"minLength": 1, "minItems": 1})


Refused = Annotated[Any, msgspec.Meta(extra_json_schema={"enum": [None]}, description="Not offered; leave it out.")]
"""Known, so that it is refused by name and never ignored."""

Nothing = Annotated[bool | None, msgspec.Meta(extra_json_schema={"enum": [None, False]})]
"""A switch that this server does not have."""
