# SPDX-License-Identifier: Apache-2.0
"""What a turn of a long session costs before it reaches the engine: control text, template, token ids.

A session made of this project's own files is brought to a number of tokens and then grows by about 800 tokens a turn.
Each turn is timed stage by stage, and its ids are compared with those of the same prompt encoded afresh. Costs are CPU
time, all threads counted, so that they depend little on what else the machine does: medians over the turns, and the
best. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import TypeVar

from tokenspeed.chat.control_text import mark_data
from tokenspeed.chat.template import ChatTemplate
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.request import pack_ids
from tokenspeed.llm.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TURN_CHARS = 2800  # about 800 tokens of code
TOKENISE_MS_MAX = 3.0
TURNS = """{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}
{{ m.content }}<end_of_turn>
{% endfor %}<start_of_turn>model
"""
"""For vocabularies that come without a template."""
Message = dict[str, object]
T = TypeVar("T")


class Clock:
    """CPU milliseconds of each stage, one entry a turn."""

    def __init__(self) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, stage: str, work: Callable[[], T]) -> T:
        """The result of `work`, whose time is noted."""
        start = time.process_time()
        result = work()
        self.times[stage].append((time.process_time() - start) * 1000)
        return result


def excerpts() -> Iterator[str]:
    """Pieces of the project's own files, over and over."""
    files = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "docs").glob("*.md"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    for number, text in enumerate(cycle(texts)):
        for start in range(0, len(text), TURN_CHARS):
            yield f"[{number}.{start}]\n{text[start : start + TURN_CHARS]}"


def turns(tokenizer: Tokenizer) -> Iterator[list[Message]]:
    """A command's output as a user message, and the assistant's next step. No output holds control text."""
    for number, excerpt in enumerate(excerpts()):
        if tokenizer.controls.held_by(excerpt):
            continue
        yield [
            {"role": "user", "content": f"<output>\n{excerpt}\n</output>"},
            {
                "role": "assistant",
                "content": f"THOUGHT: I look at step {number}.\n\n```bash\nsed -n 1,80p file.py\n```",
            },
        ]


def session(tokenizer: Tokenizer, template: ChatTemplate, num_tokens: int, num_turns: int) -> dict[str, float]:
    """Medians and bests over the turns of one session."""
    source = turns(tokenizer)
    chat: list[Message] = [{"role": "system", "content": (ROOT / "STYLE.md").read_text(encoding="utf-8")}]
    num_ids = 0
    while num_ids < num_tokens:
        chat += next(source)
        num_ids = len(tokenizer.encode_prompt(template.render(chat), add_special_tokens=False))
    clock, first = Clock(), num_ids
    for _ in range(num_turns):
        chat += next(source)
        text, num_ids = turn(clock, tokenizer, template, chat)
    result = {"tokens": num_ids, "chars": len(text), "grows_by": (num_ids - first) / num_turns}
    for stage, times in clock.times.items():
        result |= {f"{stage}_ms": round(statistics.median(times), 2), f"{stage}_best_ms": round(min(times), 2)}
    return result


def turn(clock: Clock, tokenizer: Tokenizer, template: ChatTemplate, chat: list[Message]) -> tuple[str, int]:
    """The text of one prompt and its number of tokens."""
    marked = clock.time("control", lambda: mark_data(chat, None, tokenizer.controls))
    assert marked is None, "data without control text was chosen"
    text = clock.time("template", lambda: template.render(chat))
    encoded = clock.time("tokenise", lambda: tokenizer.encode_prompt(text, add_special_tokens=False))
    engine, led = tokenizer._vocabulary.engine, tokenizer._led(text, True)
    fresh = clock.time("fresh", lambda: engine.encode(led, add_special_tokens=False).ids)
    assert list(encoded) == fresh, f"{len(fresh)} tokens: ids differ"
    assert encoded.packed == pack_ids(fresh)
    return text, len(fresh)


def opened(name: str) -> tuple[Tokenizer, ChatTemplate]:
    """The tokenizer and the template of a model."""
    source = open_model(ModelConfig(model=name))
    assert source.tokenizer is not None, f"{name} has no tokenizer"
    tokenizer = Tokenizer.from_source(source.tokenizer)
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    spelled = {key: "" if index is None else tokenizer.token_text(index) for key, index in ids.items()}
    template = source.chat_template or TURNS
    return tokenizer, ChatTemplate(template, bos_token=spelled["bos_token"], eos_token=spelled["eos_token"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen2.5-coder-1.5b", "gemma3-270m"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[50_000, 100_000])
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for name in options.models:
        tokenizer, template = opened(name)
        for num_tokens in options.tokens:
            result = results[f"{name}@{num_tokens}"] = session(tokenizer, template, num_tokens, options.turns)
            print(
                f"{name}: {result['tokens']:,.0f} tokens, {result['grows_by']:.0f} more a turn: "
                f"tokenise {result['tokenise_ms']:.2f} ms (best {result['tokenise_best_ms']:.2f}; "
                f"afresh {result.get('fresh_ms', 0):.0f}; bar {TOKENISE_MS_MAX}), "
                f"template {result['template_ms']:.2f}, control text {result['control_ms']:.2f}"
            )
    print(json.dumps({"bar_ms": TOKENISE_MS_MAX, "sessions": results}))


if __name__ == "__main__":
    main()
