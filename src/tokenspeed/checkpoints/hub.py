# SPDX-License-Identifier: Apache-2.0
"""Fetches a model from a hub by its id, through huggingface_hub. Knows which files a model is; opens none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.std import tqdm

from tokenspeed.checkpoints import ProgressFn
from tokenspeed.core.config import cache_dir, hub_endpoint
from tokenspeed.core.errors import ModelNotFoundError

_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_FILES = ("*.safetensors",)
# Folders that repositories keep beside the model proper, in other formats.
_IGNORED = ("original/*", "onnx/*", "consolidated*", "metal/*")


def fetch(hub_id: str, revision: str | None, progress: ProgressFn | None, *, with_weights: bool = True) -> Path:
    """The local snapshot folder of `org/name`, or the file of `org/name:file.gguf`. A cut connection goes on where it
    stopped; a later run fetches only files that are not complete. Raises ModelNotFoundError."""
    repo_id, _, file_name = hub_id.partition(":")
    patterns = (file_name,) if file_name else _SMALL_FILES + (_WEIGHT_FILES if with_weights else ())
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        folder = hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED),
            cache_dir=cache_dir() / "hub",
            endpoint=hub_endpoint(),
            tqdm_class=_progress_class(progress),
            library_name="tokenspeed",
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"hub model {repo_id} is gated: accept its terms on the hub, then log in (HF_TOKEN or `hf auth login`)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {repo_id}: no folder of that name here, and the hub has none or hides it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"hub model {repo_id} has no revision {revision or 'main'!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {repo_id}: no folder of that name here, it is not in the cache, and the hub cannot be reached"
        ) from error
    except (OSError, ValueError, errors.HTTPError) as error:
        raise ModelNotFoundError(f"hub model {repo_id} could not be fetched: {_first_line(error)}") from error
    if with_weights and not file_name and not any(Path(folder).glob("*.safetensors")):
        raise ModelNotFoundError(
            f"hub model {repo_id} has no *.safetensors; where it has a GGUF file, name it: {repo_id}:file.gguf"
        )
    return _chosen(Path(folder), repo_id, file_name)


def _chosen(folder: Path, repo_id: str, file_name: str) -> Path:
    if not file_name:
        return folder
    path = folder / file_name
    if not path.is_file():
        raise ModelNotFoundError(f"hub model {repo_id} has no file {file_name}")
    return path


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _progress_class(progress: ProgressFn | None) -> type[Any]:
    """A bar that draws nothing and reports bytes. The library makes several bars; the one furthest on is told."""
    best = [0]

    def report(done: int, total: int) -> None:
        if progress is not None and done >= best[0]:
            best[0] = done
            progress("download", done, max(done, total), "B")

    class _Bar(_SilentBar):
        on_bytes = staticmethod(report)

    return _Bar


class _SilentBar(tqdm):  # type: ignore[misc]
    """tqdm without output; counts bytes."""

    on_bytes: Callable[[int, int], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        kwargs["disable"] = True
        self.counts_bytes = kwargs.get("unit") == "B"
        super().__init__(*args, **kwargs)
        self.n = kwargs.get("initial") or 0
        self.total = kwargs.get("total") or 0

    def update(self, n: float | None = 1) -> bool | None:
        """Count n more."""
        self.n += n or 0
        if self.counts_bytes:
            self.on_bytes(int(self.n), int(self.total or 0))
        return None
