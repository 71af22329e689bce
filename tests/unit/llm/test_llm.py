# SPDX-License-Identifier: Apache-2.0
"""LLM: offline batches, from a script and from within a running loop; options; closing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokenspeed
from scripted import write_scripted_model
from tokenspeed.core.errors import ConfigError, InvalidRequestError
from tokenspeed.core.request import Retention, SamplingParams
from tokenspeed.llm.input_processor import TextPrompt, TokensPrompt
from tokenspeed.llm.llm import LLM, engine_config

REPLIES = (("one", "first"), ("two", "second 🧪"), ("", "other"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model", REPLIES)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), load_format="scripted", kv_tokens=4096, max_num_waiting=4) as llm:
        yield llm


def test_a_batch_comes_back_in_order(llm: LLM) -> None:
    prompts = ["two", TextPrompt("one"), TokensPrompt([1, 2]), [3, 4]]
    outputs = llm.generate(prompts)
    assert [output.outputs[0].text for output in outputs] == ["second 🧪", "first", "other", "other"]
    assert all(output.finished for output in outputs)


def test_more_prompts_than_the_queue_takes(llm: LLM) -> None:
    outputs = llm.generate(["two"] * 40, SamplingParams(n=2))
    assert {each.text for output in outputs for each in output.outputs} == {"second 🧪"}
    assert [len(output.outputs) for output in outputs] == [2] * 40


def test_single_prompts(llm: LLM) -> None:
    assert llm.generate("one")[0].outputs[0].text == "first"
    assert llm.generate([1, 2, 3])[0].prompt_token_ids == (1, 2, 3)
    assert llm.generate([]) == []


def test_params_for_each(llm: LLM) -> None:
    outputs = llm.generate(["one", "two"], [SamplingParams(max_tokens=2), SamplingParams(logprobs=0)], use_tqdm=True)
    assert [output.outputs[0].text for output in outputs] == ["fi", "second 🧪"]
    assert outputs[1].outputs[0].logprobs is not None
    assert b"".join(e.token.bytes for e in outputs[1].outputs[0].logprobs) == "second 🧪".encode()
    with pytest.raises(InvalidRequestError, match="1 params for 2 prompts"):
        llm.generate(["one", "two"], [SamplingParams()])


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "one"}]
    assert llm.chat(conversation)[0].outputs[0].text == "first"
    assert [output.outputs[0].text for output in llm.chat([conversation, conversation])] == ["first"] * 2


def test_a_wrong_prompt_refuses_the_batch_and_the_next_one_works(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["one", TokensPrompt([10**9])])
    assert llm.generate("one")[0].outputs[0].text == "first"


def test_a_session_has_one_turn_at_a_time(llm: LLM) -> None:
    keep = Retention("s", 1.0)
    (output,) = llm.generate("one", retain=keep, timeout_s=60.0)
    assert output.outputs[0].text == "first"
    assert len(llm.generate(["one", "two"], retain=[keep, None])) == 2
    assert len(llm.chat([{"role": "user", "content": "one"}], retain=keep)) == 1
    with pytest.raises(InvalidRequestError, match="1 retentions for 2 prompts"):
        llm.generate(["one", "two"], retain=keep)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        llm.generate("one", timeout_s=-1.0)


def test_it_works_within_a_running_loop(llm: LLM) -> None:
    async def notebook() -> str:
        return llm.generate("one")[0].outputs[0].text

    assert asyncio.run(notebook()) == "first"


def test_options_are_checked() -> None:
    config = engine_config(model="x", kv_tokens=64, num_threads=1, overlap_depth=0, debug=True)
    assert (config.cache.kv_tokens, config.device.num_threads, config.scheduler.overlap_depth) == (64, 1, 0)
    assert config.debug and config.model.model == "x"
    with pytest.raises(ConfigError, match="did you mean kv_tokens"):
        engine_config(kv_token=64)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine_config(max_num_seqs="many")
    with pytest.raises(ConfigError, match="block-size"):
        engine_config(block_size=3)


def test_it_is_exported_and_ends_with_its_script(folder: Path) -> None:
    """Also when the script forgets to close it: no hang, no traceback."""
    assert tokenspeed.LLM is LLM
    code = (
        "from tokenspeed import LLM\n"
        f"llm = LLM({str(folder)!r}, load_format='scripted', kv_tokens=512)\n"
        "print(llm.generate('one')[0].outputs[0].text)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\n", "")


def test_a_closed_one_says_so(folder: Path) -> None:
    llm = LLM(str(folder), load_format="scripted", kv_tokens=512)
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("one")


@pytest.mark.models
def test_a_plain_script_that_never_closes_ends_with_its_own_exit_code(smollm2_path: Path) -> None:
    script = (
        "import sys\nfrom tokenspeed import LLM, SamplingParams\n"
        f"llm = LLM({str(smollm2_path)!r}, kv_tokens=1024)\n"
        "params = SamplingParams(max_tokens=4, temperature=0)\n"
        "print(llm.generate('The capital of France is', params)[0].outputs[0].text)\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "Paris" in done.stdout
    assert "terminate" not in done.stderr
