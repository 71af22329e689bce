# SPDX-License-Identifier: Apache-2.0
"""Chat templates as models are published with them, collected in the sdist of the package llama-cpp-python.

The sdist is fetched once from the package index that pip uses, checked, and only its templates are kept, in the user's
cache. It is not built.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request

import pytest

from tokenspeed.core.config import cache_dir

VERSION = "0.3.36"
NUM_TEMPLATES = 70
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_FOLDER = "/vendor/llama.cpp/models/templates/"


def published_templates() -> dict[str, str]:
    """Template sources by file name. Skips the test, loudly, where there is neither a cached copy nor an index."""
    kept = cache_dir() / "templates" / f"llama-cpp-python-{VERSION}.json"
    if not kept.exists():
        try:
            templates = _read(_fetch())
        except (OSError, urllib.error.URLError) as error:
            pytest.skip(
                f"NO TEMPLATES WERE CHECKED: llama-cpp-python {VERSION} cannot be fetched from the index: {error}"
            )
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(templates), encoding="utf-8")
        written.replace(kept)
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def _fetch() -> bytes:
    page_url = f"{_index_url().rstrip('/')}/llama-cpp-python/"
    page = _get(page_url, "text/html").decode()
    name = f"llama_cpp_python-{VERSION}.tar.gz"
    link = next((link for link in re.findall(r'href="([^"]+)"', page) if f"/{name}" in f"/{link}"), None)
    if link is None:
        raise FileNotFoundError(f"{page_url} has no {name}")
    data = _get(urllib.parse.urljoin(page_url, html.unescape(link)), "*/*")
    assert hashlib.sha256(data).hexdigest() == _SHA256, f"{name} is not the expected file"
    return data


def _index_url() -> str:
    """What pip is told in its environment or its configuration, else the public index."""
    given = os.environ.get("PIP_INDEX_URL")
    if given:
        return given
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return told.stdout.strip() if told.returncode == 0 and told.stdout.strip() else "https://pypi.org/simple"


def _get(url: str, kind: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def _read(sdist: bytes) -> dict[str, str]:
    templates: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        for member in archive:
            if _FOLDER in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None, member.name
                templates[member.name.rsplit("/", 1)[1].removesuffix(".jinja")] = file.read().decode()
    assert len(templates) == NUM_TEMPLATES, len(templates)
    return templates
