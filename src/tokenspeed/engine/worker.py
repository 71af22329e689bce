# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m tokenspeed.engine.worker --socket PATH`. Also runs on a thread of its caller.

Receives Start, builds control plane and model runner, says EngineInfo or StartFailed, and runs the loop until the
stream ends. Execution is loaded for use only once Start has come, so that even a broken installation is told as
StartFailed.
Knows no text and no scheduling.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import EngineConfig, HostStoreName, launched_rank
from tokenspeed.core.ipc import EngineInfo, Progress, Shutdown, Start, ToEngine
from tokenspeed.core.plan import HostStore
from tokenspeed.engine.cache_watch import CacheWatch
from tokenspeed.engine.channel import Channel, ChannelClosedError
from tokenspeed.engine.failures import complain, set_up_log, start_failed
from tokenspeed.engine.process import leave
from tokenspeed.engine.ranks import RanksRunner, shape_of
from tokenspeed.engine.replica import Replica, share_of_machine
from tokenspeed.engine.step import EngineLoop
from tokenspeed.observability.stacks import answer_stacks_signal

if TYPE_CHECKING:
    from tokenspeed.control import ControlPlane
    from tokenspeed.execution import ModelRunner, RunnerInfo

_log = logging.getLogger("tokenspeed.engine.worker")  # this module may be the program
_START_WAIT_S = 60.0  # the parent may fetch a model meanwhile; that it has gone shows at once
_HOST_STORE: dict[HostStoreName, HostStore] = {"seal": HostStore.ON_SEAL, "pressure": HostStore.ON_PRESSURE}


def main(argv: list[str] | None = None) -> int:
    """Connect to the parent and serve it. The parent decides when we end: SIGINT is its business, SIGTERM is a clean
    end."""
    parser = argparse.ArgumentParser(prog="tokenspeed.engine.worker")
    parser.add_argument("--socket", required=True, help="path of the parent's unix socket")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    answer_stacks_signal()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(arguments.socket)
    except (FileNotFoundError, ConnectionRefusedError):
        return 1  # the parent was told to end before we began: its folder, or whoever listened there, has gone
    threading.Thread(target=_load_ahead, daemon=True).start()
    try:
        code = serve(sock, owns_process=True)
    except SystemExit:
        code = 0
    if any(thread.daemon and thread is not threading.current_thread() for thread in threading.enumerate()):
        leave(code)  # one that waits for another rank would be torn down in the middle
    return code


def _load_ahead() -> None:
    """Execution, which takes seconds, while the parent finds out what it has to say. Whatever is wrong with it is told
    when it is loaded for use."""
    with contextlib.suppress(Exception):
        importlib.import_module("tokenspeed.execution")


def serve(sock: socket.socket, *, owns_process: bool = False) -> int:
    """Serve the peer of `sock` until it goes or says Shutdown. Returns the exit code. owns_process: the log is ours to
    set up, and a lost rank may end the process."""
    channel = Channel(sock)
    try:
        config, early = _await_start(channel)
        if owns_process:
            set_up_log(config.debug)
        assert owns_process or config.parallel.num_ranks == 1, "several ranks need a process that may be ended"
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
        channel.send(start_failed(error))
        return 1
    try:
        channel.send(engine.info)
        engine.loop.run()
        return 0
    except ChannelClosedError:
        raise
    except Exception as error:  # noqa: BLE001 a bug ends the engine, with one line unless debugging
        complain(error, config.debug)
        return 1
    finally:
        engine.close()


class _Engine:
    """Everything that lives as long as the engine does."""

    def __init__(self, config: EngineConfig, channel: Channel) -> None:
        began = time.monotonic()
        self._runner = _build_runner(config, lambda *progress: channel.send(Progress(*progress)))
        try:
            runner_info = self._runner.info
            self.info = _describe(config, runner_info, time.monotonic() - began)
            self.loop = EngineLoop(
                _build_control(config, runner_info),
                self._runner,
                channel,
                overlap_depth=config.scheduler.overlap_depth,
                cache_watch=CacheWatch(runner_info.groups) if config.cache.events else None,
                on_fault=lambda error: complain(error, config.debug),
            )
        except BaseException:
            self.close()
            raise
        # What was loaded stays for good; collections need not look through it again.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        self._runner.close()


def _build_runner(config: EngineConfig, progress: Callable[[str, int, int, str], None]) -> ModelRunner | RanksRunner:
    launched = launched_rank()
    if config.parallel.num_ranks > 1 or (launched is not None and launched.world_size > 1):
        return _build_ranks(Replica(config), progress)
    source = open_model(config.model, progress)  # before execution is loaded, which takes seconds

    from tokenspeed.execution import ModelRunner

    return ModelRunner.create(config, source, progress)


def _build_ranks(replica: Replica, progress: Callable[[str, int, int, str], None]) -> RanksRunner:
    """Rank 0's runner with all others behind it."""
    try:
        source = open_model(replica.config.model, progress)
        config = replica.meet(_share_of_machine)

        from tokenspeed.execution import ModelRunner

        runner = replica.create(
            lambda communicator: ModelRunner.create(config, source, progress, communicator),
            lambda built: shape_of(built.info),
        )
    except BaseException:
        replica.close(in_order=False)
        raise
    _log.info("%d ranks are ready, %d of them on this machine", replica.num_ranks, replica.num_local_ranks)
    replica.arm()
    return RanksRunner(runner, replica)


def _share_of_machine(config: EngineConfig, num_local_ranks: int) -> EngineConfig:
    from tokenspeed.execution import placement

    on_cpu = placement.resolve_device(config.device).type == "cpu"
    num_cores = placement.resolve_num_threads(config.device)
    return share_of_machine(config, num_local_ranks, num_cores, on_cpu)


def _mixed_prefill_tokens(config: EngineConfig, info: RunnerInfo) -> int:
    from tokenspeed.execution import placement

    return placement.mixed_prefill_tokens(config.scheduler, info.max_num_batched_tokens)


def _mixed_step_unit(config: EngineConfig) -> int | None:
    from tokenspeed.execution import placement

    return placement.mixed_step_unit(config.scheduler, placement.resolve_device(config.device))


def _build_control(config: EngineConfig, info: RunnerInfo) -> ControlPlane:
    from tokenspeed.control import ControlPlane

    return ControlPlane(
        groups=info.groups,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_num_mixed_prefill_tokens=_mixed_prefill_tokens(config, info),
        mixed_step_unit=_mixed_step_unit(config),
        max_model_len=info.max_model_len,
        ageing_steps=config.scheduler.ageing_steps,
        prefix_caching=config.cache.prefix_caching,
        num_partitions=config.parallel.dp_attention,
        host_store=_HOST_STORE[config.cache.host_store],
        kv_events=config.cache.events,
    )


def _describe(config: EngineConfig, info: RunnerInfo, load_s: float) -> EngineInfo:
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
        max_num_mixed_prefill_tokens=_mixed_prefill_tokens(config, info),
        vocab_size=info.vocab_size,
        load_s=load_s,
        weight_bytes=info.weight_bytes,
        packed_bytes=info.packed_bytes,
        kernels=tuple(info.kernels),
    )


def _await_start(channel: Channel) -> tuple[EngineConfig, list[ToEngine]]:
    messages: list[ToEngine] = []
    while not messages:
        messages = channel.receive(_START_WAIT_S)
    if isinstance(messages[0], Shutdown):
        raise ChannelClosedError("the parent never said Start")
    first, *rest = messages
    assert isinstance(first, Start), f"the first message is {type(first).__name__}, not Start"
    if any(isinstance(message, Shutdown) for message in rest):
        raise ChannelClosedError("the parent changed its mind")
    return first.config, rest


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
