# SPDX-License-Identifier: Apache-2.0
"""`make bench-cpu` without an engine: what is asked of both, what is refused, and what is said where llama.cpp cannot
be built."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokenspeed.bench.packed_floor import Peaks
from tokenspeed.bench.pairs import Cell
from tokenspeed.bench.workers import WorkerError

FOLDER = Path(__file__).resolve().parents[3] / "bench" / "cpu"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_cpu_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return script("compare")


@pytest.fixture(scope="module")
def install_peer() -> ModuleType:
    return script("install_peer")


class Runs:
    """Commands that end with these codes, and say this."""

    def __init__(self, codes: Sequence[int], says: str = "") -> None:
        self.commands: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self._codes, self._says = list(codes), says

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        self.commands.append(list(command))
        self.environments.append(environment)
        log.write_text(self._says)
        return self._codes.pop(0)


def test_llama_cpp_is_built_from_source_for_this_processor(install_peer: ModuleType, tmp_path: Path) -> None:
    runs = Runs([0, 0, 0])
    assert install_peer.install(tmp_path / "built", runs, lambda tool: tool) is None
    build = runs.commands[1]
    assert build[build.index("--no-binary") + 1] == "llama-cpp-python"
    assert "GGML_NATIVE=ON" in runs.environments[1]["CMAKE_ARGS"]
    assert (tmp_path / "built" / ".installed").exists()
    assert "llama-cpp-python==" in install_peer.PINS.read_text()


def test_a_failed_build_is_told_with_the_line_that_matters(
    install_peer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs([0, 1], "building\nggml.c:1: fatal error: stdio.h: No such file\nbye\n")
    assert install_peer.main([str(tmp_path)], runs) == install_peer.EXIT_CODE == 3
    said = capsys.readouterr().err
    assert said.startswith("bench-cpu: llama.cpp could not be built, so there is nothing to compare with: ")
    assert "fatal error: stdio.h" in said
    assert str(tmp_path / "build.log") in said
    assert not (tmp_path / ".installed").exists()


def test_a_library_that_cannot_be_loaded_is_not_installed(install_peer: ModuleType, tmp_path: Path) -> None:
    reason = install_peer.install(tmp_path, Runs([0, 0, 1], "ImportError: libgomp"), lambda tool: tool)
    assert "cannot be loaded: ImportError: libgomp" in reason
    assert not (tmp_path / ".installed").exists()


def test_a_missing_tool_is_told_before_anything_runs(install_peer: ModuleType, tmp_path: Path) -> None:
    runs = Runs([])
    assert "cmake is missing: install CMake" in install_peer.install(tmp_path, runs, lambda _: None)
    assert runs.commands == []


def test_without_llama_cpp_nothing_is_measured(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--peer", str(tmp_path / "python")]) == 2
    assert "`make bench-cpu` builds llama.cpp" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--pairs", "0"], ["--num-tokens", "900"], ["--lengths", "0"], ["--threads", "0"]])
def test_flags_out_of_range_are_refused(
    compare: ModuleType, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(flags) == 2
    assert flags[0] in capsys.readouterr().err


def test_seven_pairs_of_three_models_are_the_default(compare: ModuleType) -> None:
    options = compare.parse([])
    assert options.pairs == 7
    assert options.threads == 2
    assert options.models == ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b"]


class Engine:
    """Remembers what it was asked; decodes at this speed."""

    def __init__(self, tokens_s: float, asked: list[tuple[str, str]], side: str) -> None:
        self.hello: dict[str, Any] = {"pids": []}
        self.requests: list[dict[str, Any]] = []
        self._tokens_s, self._asked, self._side = tokens_s, asked, side

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(json.loads(json.dumps(request)))
        self._asked.append((self._side, request["do"]))
        num_tokens = request.get("num_tokens", 0) or sum(map(len, request["prompts"]))
        ids = [7] * len(request["prompts"])
        return {"seconds": num_tokens / self._tokens_s, "num_tokens": num_tokens, "first_token_ids": ids}


@pytest.fixture
def bench(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compare, "_PAUSE_S", 0.0)
    made = object.__new__(compare.Bench)
    made._model, made._options = "tiny", argparse.Namespace(pairs=3)
    made._tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens=True: list(range(10, 10 + len(text[:5000]))) if text else [1]
    )
    made._floors = SimpleNamespace(tokens_s=lambda _: None)
    made.summaries, made.pairs = {}, {}
    return made


def test_both_engines_get_the_same_new_prompt_in_each_pair(bench: Any) -> None:
    asked: list[tuple[str, str]] = []
    workers = {"ours": Engine(30.0, asked, "ours"), "peer": Engine(10.0, asked, "peer")}
    bench._measure(Cell(100, 0, 2), workers)
    prompts = [[json.dumps(each["prompts"]) for each in worker.requests] for worker in workers.values()]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 4, "one to warm up, and one for each of three pairs"
    taken = workers["ours"].requests[1]["prompts"]
    assert [len(prompt) for prompt in taken] == [100, 100]
    assert [prompt[0] for prompt in taken] == [1, 1], "the token that begins each text"
    assert taken[0] != taken[1]
    assert bench.summaries["prompt_100_batch_2"].ratio == pytest.approx(3.0)


def test_a_context_is_prepared_once_by_both_and_decoded_after_in_every_pair(bench: Any) -> None:
    asked: list[tuple[str, str]] = []
    workers = {"ours": Engine(30.0, asked, "ours"), "peer": Engine(15.0, asked, "peer")}
    bench._measure(Cell(50, 16, 1), workers)
    assert asked[:4] == [("ours", "prepare"), ("peer", "prepare"), ("ours", "decode"), ("peer", "decode")]
    assert [side for side, _ in asked[4:]] == ["ours", "peer", "peer", "ours", "ours", "peer"]
    everything = [*workers["ours"].requests, *workers["peer"].requests]
    assert len({json.dumps(each["prompts"]) for each in everything}) == 1
    assert [each["num_tokens"] for each in workers["peer"].requests[2:]] == [16, 16, 16]
    assert bench.summaries["decode_16_at_50"].ratio == pytest.approx(2.0)


def test_sequences_have_room_in_whole_pages(compare: ModuleType) -> None:
    assert compare.room_of([Cell(1, 128, 1)]) == 320
    assert compare.room_of([Cell(512, 0, 8), Cell(1, 128, 8)]) == 768


def test_an_engine_that_fails_ends_it_with_one_line(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = tmp_path / "python"
    peer.touch()
    monkeypatch.setattr(compare.Peaks, "measure", lambda *_: Peaks(1e9, 1e9, 1e9, "avx2", 2))

    class Broken:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, _cells: object) -> None:
            raise WorkerError("peer ended with code 1: bad file")

    monkeypatch.setattr(compare, "measure_all", lambda options, all_of=compare.measure_all: all_of(options, Broken))
    assert compare.main(["tiny", "--peer", str(peer)]) == 1
    assert capsys.readouterr().err == "bench-cpu: peer ended with code 1: bad file\n"


def test_the_most_ever_held_and_what_is_held_are_two_ratios(compare: ModuleType) -> None:
    ours = {"base_bytes": 200, "rss_bytes": 320, "peak_bytes": 600}
    peer = {"base_bytes": 40, "rss_bytes": 140, "peak_bytes": 150}
    found = compare._with_ratios({"ours": ours, "peer": peer})
    assert found["ratio_peak"] == 4.0
    assert found["ratio_held"] == pytest.approx(1.2)
