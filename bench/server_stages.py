# SPDX-License-Identifier: Apache-2.0
"""The stages of an event in the API process, each measured alone on the data of bench/server.py; and IPC on both sides.

What the stages leave of the whole is the event loop, its tasks and HTTP framing.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from server_engine import tokens_message
from tokenspeed.chat.parsers import ContentDelta, Context, resolve, tool_schemas
from tokenspeed.core.ipc import FrameBuffer, Updates, decode_from_engine, encode_frame
from tokenspeed.core.request import SamplingParams, SequenceUpdate
from tokenspeed.engine.channel import Channel
from tokenspeed.llm.detokenizer import IncrementalDetokenizer
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.output_processor import SequenceText
from tokenspeed.llm.stop import StopScanner
from tokenspeed.llm.tokenizer import Tokenizer
from tokenspeed.server.openai_chat import ChatBody, Chunk, ChunkChoice, Delta, _ChunkWriter
from tokenspeed.server.sse import data_frame
from tokenspeed.server.turn import News

ROUNDS = 7
READ_BYTES = 256 * 1024  # as the event loop reads
_unused: Any = None


def best_us(work: Callable[[], object], num_items: int) -> float:
    """CPU time of `work` an item, the best of several rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times) / num_items * 1e6


def loop_ns() -> float:
    """A turn of an empty loop, to compare machines, and one machine with itself when it is busy."""
    return best_us(lambda: [None for _ in range(300_000)], 300_000) * 1e3


def ipc(num_requests: int) -> dict[str, float]:
    """A step of so many requests, the median: encode and write in the engine; read, decode and dispatch in the API
    process."""
    num_steps = 200
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    handles, token_ids = range(1, num_requests + 1), range(1000, 1000 + num_requests)
    message = tokens_message(handles, token_ids)
    drain = threading.Thread(target=_drain, args=(theirs,), daemon=True)
    drain.start()
    times = []
    for _ in range(num_steps):
        start = time.thread_time()
        channel.send(message)
        times.append(time.thread_time() - start)
    channel.close()
    drain.join()
    frame = encode_frame(message)
    return {
        "ipc_engine_us": statistics.median(times) * 1e6,
        "ipc_api_us": _api_side_us(frame, handles, num_steps),
        "ipc_frame_bytes": float(len(frame)),
    }


def _api_side_us(frame: bytes, handles: Sequence[int], num_steps: int) -> float:
    ours, theirs = socket.socketpair()
    frames = FrameBuffer()
    client = EngineClient(_unused, _unused, _unused)
    sink = _Sink()
    client._by_handle = {handle: (f"chatcmpl-{handle:032x}.{handle}", sink.push_tokens, sink) for handle in handles}

    def step() -> None:
        for body in frames.feed(ours.recv(READ_BYTES)):
            message = decode_from_engine(body)
            assert isinstance(message, Updates)
            client._dispatch(message)

    times = []
    for _ in range(num_steps):
        theirs.sendall(frame)
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    ours.close()
    theirs.close()
    return statistics.median(times) * 1e6


class _Sink:
    """Where dispatch ends."""

    def push(self, update: SequenceUpdate) -> None:
        raise NotImplementedError

    def push_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise error


def _drain(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass
    sock.close()


def stages(
    tokenizer: Tokenizer, ids: Sequence[int], dialect: str, tool: Mapping[str, object], num_streams: int
) -> dict[str, float]:
    """CPU time of each stage in µs an event of one token."""
    body = encode_frame(tokens_message(range(num_streams), ids[:num_streams]))[4:]
    texts = [tokenizer.token_text(token_id) for token_id in ids[:1000]]
    return {
        "decode a frame": best_us(lambda: [decode_from_engine(body) for _ in range(20)], 20 * num_streams),
        "detokenise": _detokenise_us(tokenizer, ids[:1000]),
        "count, collect, hand out": _collect_us(tokenizer, ids[:1000]) - _detokenise_us(tokenizer, ids[:1000]),
        "read reasoning and calls": _parse_us(texts, dialect, tool),
        "make the chunk, encode JSON": _chunk_us(texts),
        "write to the socket": _write_us(data_frame(_chunk(texts[0]))),
    }


def stop_us(tokenizer: Tokenizer, ids: Sequence[int]) -> float:
    """What two stop strings add to an event; without any there is no such stage."""
    texts = [tokenizer.token_text(token_id) for token_id in ids[:1000]]
    scanner = StopScanner(("\nUser:", "<|end|>"))
    return best_us(lambda: [scanner.feed(text) for text in texts], len(texts))


def _detokenise_us(tokenizer: Tokenizer, ids: Sequence[int]) -> float:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    return best_us(lambda: [detokenizer.push((token_id,)) for token_id in ids], len(ids))


def _collect_us(tokenizer: Tokenizer, ids: Sequence[int]) -> float:
    sequence = SequenceText(0, tokenizer, SamplingParams(skip_special_tokens=False), frozenset())
    return best_us(lambda: [(sequence.push_tokens([token_id]), sequence.take()) for token_id in ids], len(ids))


def _parse_us(texts: Sequence[str], dialect: str, tool: Mapping[str, object]) -> float:
    parser = resolve(dialect)(Context(tools=tool_schemas([tool])))
    parser.feed("Well, ")
    return best_us(lambda: [parser.feed(text) for text in texts], len(texts))


def _chunk(text: str) -> Chunk:
    delta = ContentDelta(text)
    return Chunk(
        id="chatcmpl-0123456789abcdef0123456789abcdef",
        created=1_700_000_000,
        model="smollm2-135m",
        choices=[ChunkChoice(0, Delta(content=delta.text))],
    )


def _chunk_us(texts: Sequence[str]) -> float:
    body = msgspec.convert({"messages": [], "stream": True}, ChatBody)
    served: Any = SimpleNamespace(model_name="smollm2-135m")
    job: Any = SimpleNamespace(request_id="chatcmpl-0123456789abcdef0123456789abcdef")
    writer = _ChunkWriter(served, job, body)
    news = [News(0, [ContentDelta(text)], (), None, _unused) for text in texts]
    return best_us(lambda: [writer.frames(each) for each in news], len(news))


def _write_us(frame: bytes) -> float:
    """A TCP connection on loopback, as HTTP frames its chunks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = f"{len(frame):x}\r\n".encode() + frame + b"\r\n"
    spent = 0.0
    for _ in range(2000):
        start = time.thread_time()
        ours.send(data)
        spent += time.thread_time() - start
        theirs.recv(65536)
    ours.close()
    theirs.close()
    return spent / 2000 * 1e6
