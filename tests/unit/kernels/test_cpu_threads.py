# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels' threads: any number of them, several callers, children of fork, and cores taken by others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tokenspeed.kernels import platform
from tokenspeed.kernels.registry import KernelContext, Ok, bind

CPU = KernelContext("cpu", torch.float32)

pytestmark = pytest.mark.skipif(platform.compiled_cpu(CPU) != Ok(), reason="the compiled CPU kernels are not built")


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    module = platform.require_cpu_module()
    num_threads = module.num_threads()
    yield
    module.set_num_threads(num_threads)


@pytest.fixture
def product() -> Callable[[], torch.Tensor]:
    """A matrix product with many items."""
    linear: Any = bind("linear", CPU).call
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_ND = torch.randn(130, 200, generator=generator), torch.randn(999, 200, generator=generator)
    return lambda: linear(x_TD, weight_ND, None)


def test_number_of_threads_changes_no_bit(product: Callable[[], torch.Tensor]) -> None:
    results = []
    for num_threads in (1, 2, 5):
        platform.require_cpu_module().set_num_threads(num_threads)
        results.append([product() for _ in range(20)])
    assert all(torch.equal(results[0][0], each) for run in results for each in run)


def test_several_callers_at_once(product: Callable[[], torch.Tensor]) -> None:
    platform.require_cpu_module().set_num_threads(3)
    expected, wrong = product(), []

    def work() -> None:
        for _ in range(30):
            if not torch.equal(product(), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_idle_threads_do_not_burn_the_processor(product: Callable[[], torch.Tensor]) -> None:
    platform.require_cpu_module().set_num_threads(4)
    product()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_child_of_fork_computes_alone() -> None:
    program = """
import os, sys, torch
from tokenspeed.kernels import platform
from tokenspeed.kernels.registry import KernelContext, bind
platform.require_cpu_module().set_num_threads(3)
linear = bind("linear", KernelContext("cpu", torch.float32)).call
x, w = torch.ones(64, 64), torch.ones(512, 64)
linear(x, w, None)
pid = os.fork()
if pid == 0:
    os._exit(0 if bool((linear(x, w, None) == 64).all()) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    finished = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=60, check=False)
    assert finished.returncode == 0


@pytest.mark.slow
def test_shared_cores_slow_it_down_in_proportion(product: Callable[[], torch.Tensor]) -> None:
    """With every core also taken by a busy process, a call may take about twice as long, not ten times."""

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(40):
            product()
        return time.perf_counter() - started

    platform.require_cpu_module().set_num_threads(platform.num_cpus())
    seconds()
    quiet = min(seconds() for _ in range(3))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(platform.num_cpus())]
    try:
        time.sleep(0.3)
        shared = min(seconds() for _ in range(3))
    finally:
        for process in busy:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert shared < 5 * quiet, (quiet, shared)
