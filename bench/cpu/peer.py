# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as one of two engines that take turns: told what to run by lines of JSON, answers with lines of JSON.

Runs in the environment that install_peer.py makes, and so imports nothing of ours. Speaks to the library's C interface:
no sampler, no tokenizer and no Python for each token but the call, the most likely of its logits and the next call.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

_BATCH_LEN = 2048
_BUFFER = re.compile(r"(\S+)\s+(model|KV|output|compute|RS) buffer size =\s*([\d.]+) MiB")
Token = tuple[int, int, int, bool]
"""Token id, position, sequence, and whether its logits are wanted."""


def main() -> None:
    """Serve standard input until it ends; with --load-only say how long loading takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="a GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--num-seqs", type=int, required=True, help="sequences at once")
    parser.add_argument("--context", type=int, required=True, help="tokens that each of them may have")
    parser.add_argument("--load-only", action="store_true")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is no reply
    base_bytes = resident_bytes("VmRSS")
    engine = Engine(options.path, options.threads, options.num_seqs, options.context)
    if options.load_only:
        replies.write(json.dumps({"weights_s": engine.weights_s, "ready_s": engine.ready_s}) + "\n")
        return
    hello = {"ready_s": engine.ready_s, "pids": [os.getpid()], "describes": engine.describe()}
    replies.write(json.dumps(hello) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(engine.answer(json.loads(line), base_bytes)) + "\n")


class Engine:
    """A loaded model with a context for `num_seqs` sequences, each with a cache of its own."""

    def __init__(self, path: Path, num_threads: int, num_seqs: int, context_len: int) -> None:
        self._buffers: defaultdict[str, float] = defaultdict(float)
        self._on_log = llama_cpp.llama_log_callback(self._log)  # held, or it would be freed
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p())
        began = time.perf_counter()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        assert self._model, f"llama.cpp cannot load {path}"
        self.weights_s = time.perf_counter() - began
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = num_seqs * context_len, num_seqs, False
        params.n_batch, params.n_outputs_max, params.swa_full = _BATCH_LEN, num_seqs, False
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp makes no context for {num_seqs} sequences of {context_len} tokens"
        self.ready_s = time.perf_counter() - began
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_BATCH_LEN, 0, 1)
        self._prepared: list[list[int]] = []
        self._next_ids: list[int] = []

    def describe(self) -> str:
        """What the library was built for."""
        text: str = llama_cpp.llama_print_system_info().decode()
        return f"llama-cpp-python {llama_cpp.__version__} | {text.strip()}"

    def answer(self, request: dict[str, Any], base_bytes: int) -> dict[str, Any]:
        """Do what a line says."""
        match request["do"]:
            case "prompt":
                return self.prompt(request["prompts"])
            case "prepare":
                self._prepare(request["prompts"])
                return {}
            case "decode":
                return self.decode(request["prompts"], request["num_tokens"])
            case _:
                return {
                    "base_bytes": base_bytes,
                    "rss_bytes": resident_bytes("VmRSS"),
                    "peak_bytes": resident_bytes("VmHWM"),
                    "parts": {name: int(size * (1 << 20)) for name, size in self._buffers.items()},
                }

    def prompt(self, prompts: list[list[int]]) -> dict[str, Any]:
        """All of them at once, to the most likely token after each."""
        self._prepared = []
        began = time.perf_counter()
        llama_cpp.llama_memory_clear(self._memory, False)
        first_ids = self._run(list(_rows_of(prompts)))
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "num_tokens": sum(map(len, prompts)), "first_token_ids": first_ids}

    def decode(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """num_tokens greedy ones after each of the prompts, which are there already when the clock starts."""
        if self._prepared != prompts:
            self._prepare(prompts)
        for seq_id, prompt in enumerate(prompts):
            assert llama_cpp.llama_memory_seq_rm(self._memory, seq_id, len(prompt), -1), "the context cannot be cut"
        ids = self._next_ids
        began = time.perf_counter()
        for step in range(num_tokens):
            ids = self._run([(ids[seq_id], len(each) + step, seq_id, True) for seq_id, each in enumerate(prompts)])
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "num_tokens": num_tokens * len(prompts), "first_token_ids": self._next_ids}

    def _prepare(self, prompts: list[list[int]]) -> None:
        self._next_ids = self.prompt(prompts)["first_token_ids"]
        self._prepared = prompts

    def _run(self, tokens: Sequence[Token]) -> list[int]:
        """The most likely token after each whose logits are wanted."""
        found: list[int] = []
        for begin in range(0, len(tokens), _BATCH_LEN):
            part = tokens[begin : begin + _BATCH_LEN]
            self._fill(part)
            status = llama_cpp.llama_decode(self._context, self._batch)
            assert status == 0, f"llama_decode failed: {status}"
            found += self._most_likely(sum(wanted for _, _, _, wanted in part))
        return found

    def _fill(self, tokens: Sequence[Token]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token_id, position, seq_id, wanted) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token_id, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, seq_id

    def _most_likely(self, num_rows: int) -> list[int]:
        if num_rows == 0:
            return []
        logits = llama_cpp.llama_get_logits(self._context)
        ids: list[int] = np.ctypeslib.as_array(logits, (num_rows, self.vocab_size)).argmax(axis=1).tolist()
        return ids

    def _log(self, _level: int, text: bytes, _data: object) -> None:
        found = _BUFFER.search(text.decode(errors="replace"))
        if found is not None:
            self._buffers[f"{found[1]} {found[2]}"] += float(found[3])


def _rows_of(prompts: list[list[int]]) -> Iterator[Token]:
    for seq_id, prompt in enumerate(prompts):
        for position, token_id in enumerate(prompt):
            yield token_id, position, seq_id, position == len(prompt) - 1


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (at most so far) of this process."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index(f"{field}:") + 1]) * 1024


if __name__ == "__main__":
    main()
