# SPDX-License-Identifier: Apache-2.0
"""Sessions that grow turn by turn have, with real vocabularies, the ids of their prompts encoded afresh.

The default suite takes sessions made of this project's own files. The slow test takes every turn of every recorded
agent session in the folder `TOKENSPEED_TRACES`, else in shared/traces beside the checkout.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tokenspeed.chat.template import ChatTemplate
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.request import pack_ids
from tokenspeed.llm.piece_cache import PieceCache
from tokenspeed.llm.tokenizer import Tokenizer

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[3]
TRACES = Path(os.environ.get("TOKENSPEED_TRACES", ROOT.parent / "shared" / "traces"))
TURNS = """{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}
{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}{{ m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
"""For vocabularies that come without a template."""
Chat = Sequence[Mapping[str, object]]


@cache
def opened(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    source = open_model(ModelConfig(model=str(path)))
    assert source.tokenizer is not None
    tokenizer = Tokenizer.from_source(source.tokenizer)
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    spelled = {name: "" if index is None else tokenizer.token_text(index) for name, index in names.items()}
    return tokenizer, ChatTemplate(source.chat_template or TURNS, **spelled)


def fresh_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encoded at once and from scratch, by the engine itself."""
    vocabulary = tokenizer._vocabulary
    if vocabulary.lead and not text.startswith(tuple(vocabulary.literals.values())):
        text = vocabulary.lead + text
    return list(vocabulary.engine.encode(text, add_special_tokens=False).ids)


def check(path: Path, chats: Iterator[Chat]) -> int:
    """How many turns there were, each checked."""
    tokenizer, template = opened(path)
    num_turns = 0
    for chat in chats:
        for end, message in enumerate(chat, start=1):
            if message["role"] == "assistant":
                continue
            text = template.render(chat[:end])
            encoded = tokenizer.encode_prompt(text, add_special_tokens=False)
            expected = fresh_ids(tokenizer, text)
            assert list(encoded) == expected, (path.name, end)
            assert encoded.packed == pack_ids(expected)
            num_turns += 1
    return num_turns


def own_sessions() -> Iterator[Chat]:
    """Two sessions with the same beginning, in which files of the project are read."""
    files = sorted((ROOT / "src" / "tokenspeed" / "llm").glob("*.py")) + sorted((ROOT / "docs").glob("*.md"))
    system = {"role": "system", "content": (ROOT / "STYLE.md").read_text()}
    for chosen in (files[::5], files[1::5]):
        chat = [system]
        for number, path in enumerate(chosen):
            chat.append(
                {"role": "user", "content": f"Output of step {number}, 日本語 👩‍🚀:\n{path.read_text()[:12_000]}"}
            )
            chat.append({"role": "assistant", "content": f"THOUGHT: {path.name}\n\n```bash\ncat -n {path.name}\n```"})
        yield chat


def recorded_sessions() -> Iterator[Chat]:
    for path in sorted(TRACES.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["messages"]


@pytest.mark.parametrize(
    "fixture",
    ["smollm2_path", "gemma3_path", "tinycoder_path", pytest.param("qwen_coder_path", marks=pytest.mark.slow)],
)
def test_sessions_that_grow_have_the_ids_of_fresh_prompts(fixture: str, request: pytest.FixtureRequest) -> None:
    assert check(request.getfixturevalue(fixture), own_sessions()) > 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fixture", ["qwen_coder_path", "smollm2_path", "gemma3_path"])
def test_every_turn_of_recorded_sessions_has_the_ids_of_a_fresh_prompt(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    if not list(TRACES.glob("*.jsonl.gz")):
        pytest.skip(f"no recorded sessions in {TRACES}; set TOKENSPEED_TRACES to a folder of *.jsonl.gz")
    print(fixture, check(request.getfixturevalue(fixture), recorded_sessions()), "turns")


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_a_turn_encodes_what_it_adds_and_little_more(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer, template = opened(request.getfixturevalue(fixture))
    engine, encoded = tokenizer._vocabulary.engine, []

    class Noting:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
            encoded.extend(texts)
            return engine.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    cache = PieceCache(Noting(), tokenizer._vocabulary.cuts)  # type: ignore[arg-type]
    chat = next(own_sessions())
    texts = [template.render(chat[:end], add_generation_prompt=False) for end in range(2, len(chat) + 1, 2)]
    before = ""
    for text in texts:
        assert text.startswith(before)
        encoded.clear()
        cache.encode(text)
        assert sum(map(len, encoded)) <= len(text) - len(before) + 800
        before = text
