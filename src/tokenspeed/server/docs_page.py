# SPDX-License-Identifier: Apache-2.0
"""The page /docs: one file that draws /openapi.json and asks this server alone. Knows no route."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.responses import Response

_FILE = Path(__file__).with_name("docs_page.html")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def docs_page() -> Response:
    """The page, with a policy that keeps it from all other hosts."""
    return Response(_page(), media_type="text/html", headers={"content-security-policy": _POLICY})


@cache
def _page() -> bytes:
    return _FILE.read_bytes()
