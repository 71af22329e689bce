# SPDX-License-Identifier: Apache-2.0
"""What grammars cost a token, and how much of real tool schemas they enforce.

`make bench-grammar` fetches the schemas first (bench/mcp_tools.py). For each tool: is its whole schema enforced, what
of it is not, and do random texts that the masks allow fit the schema? The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.grammar import Compiler, Grammar, Matcher, SchemaError, Tag, Tags, as_text, fit_schema, resolve
from tokenspeed.llm.grammars import vocabulary_of
from tokenspeed.llm.tokenizer import Tokenizer

WALK_TOKENS = 400


def main() -> None:
    """Print the tables and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", type=Path, help="tools.json of bench/mcp_tools.py")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--walks", type=int, default=3, help="random texts a tool")
    options = parser.parse_args()
    source = open_model(ModelConfig(model=options.model), None)
    assert source.tokenizer is not None, f"{options.model} has no tokenizer"
    tokenizer = Tokenizer.from_source(source.tokenizer)
    assert tokenizer.eos_id is not None, f"{options.model} has no end token"
    bench = Bench(tokenizer, random.Random(0))
    tools = json.loads(options.tools.read_text())
    rows = [bench.coverage(server, each, options.walks) for server, each in tools.items()]
    print_table(rows)
    costs = bench.costs([tool for each in tools.values() for tool in each])
    print_costs(costs, tokenizer.vocab_size)
    totals = {key: sum(row[key] for row in rows) for key in ("tools", "whole", "partly", "refused", "walks", "unfit")}
    print(json.dumps({"coverage": totals, "microseconds": costs}))


class Bench:
    """One vocabulary."""

    def __init__(self, tokenizer: Tokenizer, chance: random.Random) -> None:
        self._tokenizer, self._chance = tokenizer, chance
        assert tokenizer.eos_id is not None
        self._end: int = tokenizer.eos_id
        self._compiler: Compiler = resolve("llguidance", vocabulary_of(tokenizer, [self._end]))
        self._mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        texts = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
        self._closes = np.array([index for index, text in enumerate(texts) if text.strip() in (b'"', b"}", b"]")])
        self._plain = np.array([index for index, text in enumerate(texts) if text.isascii() and 0 < len(text) < 5])

    def coverage(self, server: str, tools: Sequence[dict[str, Any]], num_walks: int) -> dict[str, Any]:
        """Counts of one server's tools. unfit: random texts that the masks allowed and the schema does not."""
        row: dict[str, Any] = {"server": server, "tools": len(tools), "whole": 0, "partly": 0, "refused": 0}
        row |= {"walks": 0, "unfit": 0, "unenforced": set()}
        for tool in tools:
            schema = {"type": "object", **tool.get("inputSchema", {})}
            try:
                fitted = fit_schema(schema, strict=False)
            except SchemaError as error:
                print(f"{server} {tool['name']}: {error}")
                row["refused"] += 1
                continue
            row["partly" if fitted.unenforced else "whole"] += 1
            row["unenforced"] |= {path.rsplit(".", 1)[-1] for path in fitted.unenforced}
            matcher = self._compiler.compile(Grammar("json_schema", as_text(fitted.schema)))
            for _ in range(num_walks):
                text = self._walk(matcher.copy())
                if text is not None:
                    row["walks"] += 1
                    row["unfit"] += not _fits(fitted.schema, text)
        return row

    def _walk(self, matcher: Matcher) -> str | None:
        """A random text that the masks allow; None when it found no end."""
        ids: list[int] = []
        for count in range(WALK_TOKENS):
            matcher.fill(self._mask)
            allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little").astype(bool)
            if allowed[self._end] and (count > WALK_TOKENS // 2 or self._chance.random() < 0.5):
                return self._tokenizer.decode(ids)
            for pool in (self._closes, self._plain) if self._chance.random() < 0.5 else (self._plain, self._closes):
                some = pool[allowed[pool]]
                if len(some):
                    break
            choices = some if len(some) else np.flatnonzero(allowed)
            token_id = int(self._chance.choice(choices.tolist()))
            if token_id == self._end:
                return self._tokenizer.decode(ids)
            assert matcher.accept(token_id), "a token that was allowed is refused"
            ids.append(token_id)
        return None

    def costs(self, tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
        """Microseconds for texts of several kinds, with thirty real tools where there are any."""
        some = tools[:: max(1, len(tools) // 30)][:30]
        tags = [
            Tag(
                "<tool_call>",
                f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": ',
                "}\n</tool_call>",
                as_text(fit_schema({"type": "object", **tool.get("inputSchema", {})}, strict=False).schema),
            )
            for tool in some
        ]
        schema = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
        call = Tag("<tool_call>", '<tool_call>\n{"name": "sh", "arguments": ', "}\n</tool_call>", json.dumps(schema))
        calls = Grammar("tags", msgspec.json.encode(Tags((*tags, call))).decode())
        said = (
            '<tool_call>\n{"name": "sh", "arguments": {"cmd": "grep -rn \\"def main\\" src | head -20"}}\n</tool_call>'
        )
        return {
            "free text, thirty tools": self._cost(calls, "I will look for the place where the program begins. " * 4),
            "a call, thirty tools": self._cost(calls, f"Let me see.\n{said}"),
            "an answer with a schema": self._cost(Grammar("json_schema", json.dumps(schema)), '{"cmd": "make test"}'),
            "a regular expression": self._cost(Grammar("regex", r"[a-z0-9 ]+\.py"), "the quick brown fox 12.py"),
        }

    def _cost(self, grammar: Grammar, text: str) -> dict[str, float]:
        compile_us = _timed(lambda: self._compiler.compile(grammar))
        first = self._compiler.compile(grammar)
        copy_us = statistics.median(_timed(first.copy) for _ in range(9))
        fills, accepts = [], []
        for _ in range(5):
            matcher = first.copy()
            for token_id in self._tokenizer.encode(text, add_special_tokens=False):
                fills.append(_timed(partial(matcher.fill, self._mask)))
                accepts.append(_timed(partial(matcher.accept, token_id)))
        return {
            "compile": round(compile_us),
            "copy": round(copy_us),
            "mask": round(statistics.median(fills), 1),
            "mask_99": round(sorted(fills)[len(fills) * 99 // 100]),
            "accept": round(statistics.median(accepts), 1),
        }


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def _fits(schema: Any, text: str) -> bool:
    """A number beyond a double is a number all the same."""
    try:
        return bool(jsonschema_rs.is_valid(schema, json.loads(text, parse_float=_finite)))
    except ValueError:
        return False


def _finite(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """In the form that the documentation has it."""
    print("| server | tools | enforced whole | in part | not | left out | random texts | of them unfit |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        left = ", ".join(sorted(row["unenforced"])) or "none"
        counts = " | ".join(str(row[key]) for key in ("tools", "whole", "partly", "refused"))
        print(f"| {row['server']} | {counts} | {left} | {row['walks']} | {row['unfit']} |")


def print_costs(costs: dict[str, dict[str, float]], vocab_size: int) -> None:
    """Microseconds."""
    print(f"\nmicroseconds, vocabulary of {vocab_size:,} tokens")
    print("| text | compile | copy | mask, median | mask, 99 % | accept |\n|---|---|---|---|---|---|")
    for name, cost in costs.items():
        print(
            f"| {name} | {cost['compile']} | {cost['copy']} | {cost['mask']} | {cost['mask_99']} | {cost['accept']} |"
        )


if __name__ == "__main__":
    main()
