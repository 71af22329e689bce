# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that others wrote run to their end against the server, and report what the script makes certain."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import MODEL, Place, StartPlace, program
from clients.prompts import CHAT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

REPLY = "The seventh word of the reply is this one, and the rest is never asked for."
VOCAB_SIZE = 258
"""Of the scripted tokenizer: the bytes, a beginning and an end. Each token is as likely as any other."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def copy_tokenizer(here: Place, folder: Path) -> None:
    """The server's tokenizer as the client's own, in `tok` of the working folder."""
    shutil.copytree(folder / "model" / "tokenizer", here.work / "tok")
    names_path = here.work / "tok" / "tokenizer_config.json"
    names = json.loads(names_path.read_text())
    names_path.write_text(json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}))


def test_lm_eval_scores_choices(place: StartPlace, tmp_path: Path) -> None:
    """By /v1/completions with ids as the prompt, echo and log-probabilities: -ln(vocabulary) a token of the choice."""
    here = place([("", REPLY)])
    copy_tokenizer(here, tmp_path)
    questions = [
        {"question": "One plus one is", "choices": ["two", "three"], "answer": 0},
        {"question": "A fox is an", "choices": ["instrument", "animal"], "answer": 1},
        {"question": "Water is", "choices": ["dry", "liquid"], "answer": 1},
    ]
    how = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    results, samples = run_lm_eval(here, "local-completions", "completions", questions, how)
    assert results["acc,none"] == pytest.approx(2 / 3), "the shorter choice is the likelier one"
    for question, sample in zip(questions, samples, strict=True):
        lengths = [len(f" {choice}") for choice in question["choices"]]
        told = [float(response[0][0]) for response in sample["resps"]]
        assert told == pytest.approx([-length * math.log(VOCAB_SIZE) for length in lengths], rel=1e-4)
    bodies = [exchange.json() for exchange in here.exchanges() if exchange.method == "POST"]
    assert all(body["echo"] and isinstance(body["prompt"][0][0], int) for body in bodies)


def test_lm_eval_asks_by_chat(place: StartPlace, tmp_path: Path) -> None:
    here = place([("What is the colour", "It is green.\nAnd more.")])
    copy_tokenizer(here, tmp_path)
    questions = [
        {"question": f"What is the colour of {thing}?", "answer": "It is green."} for thing in ("grass", "snow")
    ]
    how = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    results, samples = run_lm_eval(
        here, "local-chat-completions", "chat/completions", questions, how, "--apply_chat_template"
    )
    assert results["exact_match,none"] == 1.0
    assert [sample["resps"] for sample in samples] == [[["It is green."]]] * 2
    here.warm_steps(2)


def run_lm_eval(
    here: Place, kind: str, path: str, questions: list[dict[str, Any]], how: dict[str, Any], *flags: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What it says of a task with these questions: the metrics, and each question's answers in their order."""
    data = here.work / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **how,
    }
    (here.work / "tasks").mkdir()
    (here.work / "tasks" / "questions.yaml").write_text(json.dumps(task))
    here.run(
        program("lm_eval", "bin", "lm_eval"), "--model", kind, "--tasks", "questions", "--include_path", "tasks",
        "--model_args",
        f"model={MODEL},base_url={here.url}/v1/{path},tokenizer_backend=huggingface,tokenizer=./tok,num_concurrent=2",
        "--output_path", "results", "--log_samples", *flags,
        **OFFLINE,
    )  # fmt: skip
    (results,) = (here.work / "results").rglob("results_*.json")
    (samples,) = (here.work / "results").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    metrics: dict[str, Any] = json.loads(results.read_text())["results"]["questions"]
    return metrics, sorted(rows, key=lambda row: row["doc_id"])


def test_evalscope_replays_coding_sessions(place: StartPlace) -> None:
    """Several turns of a session with tool results in it: each turn finds the one before in the cache."""
    here = place([("", REPLY)])
    conversations = [[_turn(session, number) for number in range(3)] for session in range(2)]
    (here.work / "agentic_dataset.json").write_text(json.dumps({"conversations": conversations}))
    here.run(
        program("evalscope", "bin", "evalscope"), "perf", "--url", f"{here.url}/v1/chat/completions", "--api", "openai",
        "--model", MODEL, "--dataset", "swe_smith", "--dataset-path", "agentic_dataset.json", "--multi-turn",
        "--max-turns", "3", "-n", "2", "--parallel", "2", "--max-tokens", "16", "--outputs-dir", "report",
        "--no-timestamp",
        **OFFLINE,
    )  # fmt: skip
    steps = here.warm_steps(6)
    for session in range(2):
        turns = [step for step in steps if f"module {session}." in step.exchange.body.decode()]
        assert [step.exchange.path for step in turns] == [CHAT] * 3
        for earlier, later in itertools.pairwise(turns):
            assert later.shared > earlier.prompt_len, "the reply is in the cache as well"


def _turn(session: int, number: int) -> dict[str, Any]:
    """What a turn adds to a session."""
    if number == 0:
        added = [
            {"role": "system", "content": "You edit files."},
            {"role": "user", "content": f"Fix the bug in module {session}."},
        ]
    else:
        added = [{"role": "user", "content": f"The command printed {number} lines of session {session}."}]
    return {"messages": added, "prompt_tokens": 50 * (number + 1)}


def test_aiperf_measures_sessions(place: StartPlace, tmp_path: Path) -> None:
    here = place([("", REPLY)])
    copy_tokenizer(here, tmp_path)
    here.run(
        program("aiperf", "bin", "aiperf"), "profile", "--model", MODEL, "--url", here.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", "./tok", "--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "10",
        "--conversation-num", "3", "--conversation-turn-mean", "2", "--concurrency", "2", "--ui", "none",
        "--artifact-dir", "report",
    )  # fmt: skip
    steps = here.warm_steps(6)
    assert len(steps) == 6
    (report,) = (here.work / "report").rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == 6
    sessions = itertools.groupby(
        sorted(steps, key=lambda step: step.exchange.headers["x-correlation-id"]),
        key=lambda step: step.exchange.headers["x-correlation-id"],
    )
    assert [len(list(session)) for _, session in sessions] == [2, 2, 2]
