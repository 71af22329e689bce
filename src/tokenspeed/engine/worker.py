# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m tokenspeed.engine.worker --socket PATH`. Also runs on a thread of its caller.

Receives Start, builds control plane and model runner, says EngineInfo or StartFailed, and runs the loop until the
stream ends. Execution is loaded only once Start has come, so that even a broken installation is told as StartFailed.
Knows no text and no scheduling.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import EngineConfig, HostStoreName
from tokenspeed.core.errors import CapacityError, StartError
from tokenspeed.core.ipc import EngineInfo, Progress, Shutdown, Start, StartFailed, ToEngine
from tokenspeed.core.plan import HostStore
from tokenspeed.engine.channel import Channel, ChannelClosedError
from tokenspeed.engine.step import EngineLoop
from tokenspeed.observability.logging import ROOT, set_up_logging

if TYPE_CHECKING:
    from tokenspeed.control import ControlPlane
    from tokenspeed.execution import ModelRunner, RunnerInfo

_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
_START_WAIT_S = 60.0
_HOST_STORE: dict[HostStoreName, HostStore] = {"seal": HostStore.ON_SEAL, "pressure": HostStore.ON_PRESSURE}


def main(argv: list[str] | None = None) -> int:
    """Connect to the parent and serve it. The parent decides when we end: SIGINT is its business, SIGTERM is a clean
    end."""
    parser = argparse.ArgumentParser(prog="tokenspeed.engine.worker")
    parser.add_argument("--socket", required=True, help="path of the parent's unix socket")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(arguments.socket)
    return serve(sock, owns_process=True)


def serve(sock: socket.socket, *, owns_process: bool = False) -> int:
    """Serve the peer of `sock` until it goes or says Shutdown. Returns the exit code. owns_process: the log is ours to
    set up."""
    channel = Channel(sock)
    try:
        config, early = _await_start(channel)
        if owns_process:
            _set_up_logging(config.debug)
        return _serve_config(config, channel, early)
    except ChannelClosedError:
        return 0
    finally:
        channel.close()


def _serve_config(config: EngineConfig, channel: Channel, early: list[ToEngine]) -> int:
    assert not early, f"{len(early)} messages before the engine was ready"
    try:
        engine = _Engine(config, channel)
    except ChannelClosedError:
        raise
    except Exception as error:  # noqa: BLE001 whatever went wrong, the parent tells it in one line
        channel.send(_start_failed(error))
        return 1
    try:
        channel.send(engine.info)
        engine.loop.run()
        return 0
    except ChannelClosedError:
        raise
    except Exception as error:  # noqa: BLE001 a bug ends the engine, with one line unless debugging
        _complain(error, config.debug)
        return 1
    finally:
        engine.close()


class _Engine:
    """Everything that lives as long as the engine does."""

    def __init__(self, config: EngineConfig, channel: Channel) -> None:
        began = time.monotonic()
        self._runner = _build_runner(config, lambda *progress: channel.send(Progress(*progress)))
        self.info = _describe(config, self._runner, time.monotonic() - began)
        self.loop = EngineLoop(
            _build_control(config, self._runner.info),
            self._runner,
            channel,
            overlap_depth=config.scheduler.overlap_depth,
            on_fault=lambda error: _complain(error, config.debug),
        )
        # What was loaded stays for good; collections need not look through it again.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        self._runner.close()


def _build_runner(config: EngineConfig, progress: Callable[[str, int, int, str], None]) -> ModelRunner:
    source = open_model(config.model, progress)  # before execution is loaded, which takes seconds

    from tokenspeed.execution import ModelRunner

    return ModelRunner.create(config, source, progress)


def _build_control(config: EngineConfig, info: RunnerInfo) -> ControlPlane:
    from tokenspeed.control import ControlPlane

    return ControlPlane(
        groups=info.groups,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        ageing_steps=config.scheduler.ageing_steps,
        prefix_caching=config.cache.prefix_caching,
        host_store=_HOST_STORE[config.cache.host_store],
    )


def _describe(config: EngineConfig, runner: ModelRunner, load_s: float) -> EngineInfo:
    info = runner.info
    return EngineInfo(
        model_type=info.model_type,
        num_parameters=info.num_parameters,
        device=info.device,
        dtype=info.dtype,
        num_threads=info.num_threads,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        kv_bytes=info.kv_bytes,
        num_host_blocks=info.groups[0].num_host_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        vocab_size=info.vocab_size,
        load_s=load_s,
        kernels=tuple(info.kernels),
    )


def _await_start(channel: Channel) -> tuple[EngineConfig, list[ToEngine]]:
    messages = channel.receive(_START_WAIT_S)
    if not messages or isinstance(messages[0], Shutdown):
        raise ChannelClosedError("the parent never said Start")
    first, *rest = messages
    assert isinstance(first, Start), f"the first message is {type(first).__name__}, not Start"
    if any(isinstance(message, Shutdown) for message in rest):
        raise ChannelClosedError("the parent changed its mind")
    return first.config, rest


def _start_failed(error: Exception) -> StartFailed:
    details = "".join(traceback.format_exception(error))
    if isinstance(error, StartError):
        return StartFailed(type(error).__name__, str(error), details)
    if _is_out_of_memory(error):
        return StartFailed(
            CapacityError.__name__,
            "out of memory while loading the model: use a smaller model, a smaller --kv-tokens or a larger machine",
            details,
        )
    return StartFailed(StartError.__name__, f"the engine failed to start: {_one_line(error)}", details)


def _is_out_of_memory(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in words for phrase in _MEMORY_WORDS)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _complain(error: Exception, debug: bool) -> None:
    """One line on stderr, or the whole traceback when debugging."""
    text = "".join(traceback.format_exception(error)) if debug else f"tokenspeed engine: {_one_line(error)}\n"
    sys.stderr.write(text)
    sys.stderr.flush()


def _set_up_logging(debug: bool) -> None:
    """The program's log; tracebacks are shortened to their last line unless debugging."""
    set_up_logging(debug=debug)
    if not debug:
        for handler in logging.getLogger(ROOT).handlers:
            handler.addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        record.msg = f"{record.getMessage()}: {' '.join(str(record.exc_info[1]).split())}"
        record.args, record.exc_info = None, None
    return True


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
