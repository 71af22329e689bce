# SPDX-License-Identifier: Apache-2.0
"""The ranks of a communicator, as threads and as processes, against numpy and against each other.

Run as a program, this file is one rank; `main` says with which arguments.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.kernels.ops.collective import Communicator, RankGroup, RankLostError, Rendezvous, open_store
from tokenspeed.kernels.registry import KernelContext, Reason, bind, solutions_of

Partition = tuple[tuple[int, ...], ...]
COUNTS = {"even": (3, 3, 3, 3), "ragged": (2, 0, 5, 1), "idle": (0, 0, 0, 0)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
KINDS = (*(("ragged", dtype) for dtype in DTYPES), ("even", torch.float32), ("idle", torch.bfloat16))
TAILS = {"even": (2, 2), "ragged": (3,), "idle": (4,)}
PARTITIONS: dict[int, tuple[Partition, ...]] = {
    1: (((0,),),),
    2: (((0, 1),), ((0,), (1,))),
    3: (((0, 1, 2),), ((0, 2), (1,))),
    4: (((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1, 2, 3))),
}
NUMBERS = itertools.count()


def numbers(name: str, rank: int, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Small whole numbers, whose sums are exact in every dtype."""
    return np.random.default_rng((zlib.crc32(name.encode()), rank)).integers(0, 9, shape)


def fractions(rank: int, size: int) -> np.ndarray[Any, Any]:
    """Their sums depend on the order."""
    values = np.random.default_rng(rank).standard_normal(size) * 10.0 ** (rank % 3)
    return values.astype(np.float32)


def sent(kind: str, place: int, other: int) -> int:
    """Rows from one member to another in all_to_all."""
    return COUNTS[kind][(place + 2 * other) % 4]


def play(ranks: Communicator, device: str) -> dict[str, Any]:
    """What this rank gets from every operation, by name, on the CPU."""
    answers: dict[str, Any] = {"words": ranks.gather(f"rank {ranks.rank}é" * ranks.rank)}
    for partition in PARTITIONS[ranks.world_size]:
        group = ranks.group(partition)
        assert ranks.group([list(each) for each in partition]) is group
        assert ranks.rank in group.members
        for kind, dtype in KINDS:
            for name, answer in operations(group, ranks.rank, kind, dtype, device).items():
                answers[f"{partition} {kind} {dtype} {name}"] = answer.cpu()
        place = group.members.index(ranks.rank)
        flags = torch.tensor([place == 1, True], device=device)
        answers[f"{partition} flags"] = group.all_gather(flags, (2,) * len(group.members)).cpu()
        for size in (7, 40_001):
            x = torch.from_numpy(fractions(ranks.rank, size)).to(device)
            answers[f"{partition} order {size}"] = group.all_reduce(x).cpu()
            answers[f"{partition} order {size} half"] = group.all_reduce(x.bfloat16()).cpu()
    return answers


def operations(group: RankGroup, rank: int, kind: str, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    def made(name: str, num_rows: int) -> torch.Tensor:
        """A transposed view, so not contiguous."""
        x = numbers(f"{kind} {name}", rank, (num_rows, *TAILS[kind]))
        return torch.from_numpy(np.ascontiguousarray(x.T)).to(device, dtype).permute(*range(x.ndim)[::-1])

    place, counts = group.members.index(rank), COUNTS[kind][: len(group.members)]
    whole, mine = made("whole", sum(counts)), made("mine", counts[place])
    before = whole.clone(), mine.clone()
    parts = [made(f"to {other}", sent(kind, place, other)) for other in range(len(group.members))]
    answers = {
        "all_reduce": group.all_reduce(whole),
        "all_gather": group.all_gather(mine, counts),
        "reduce_scatter": group.reduce_scatter(whole, counts),
        "broadcast": made("whole", sum(counts)),
    }
    answers |= {f"from {other}": part for other, part in enumerate(group.all_to_all(parts))}
    assert group.broadcast(answers["broadcast"]) is answers["broadcast"]
    assert torch.equal(whole, before[0])
    assert torch.equal(mine, before[1])
    return answers


def expected(rank: int, partition: Partition, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    """The same by numpy."""
    [members] = [each for each in partition if rank in each]
    place, counts = members.index(rank), COUNTS[kind][: len(members)]
    wholes = [numbers(f"{kind} whole", each, (sum(counts), *TAILS[kind])) for each in members]
    rows = zip(members, counts, strict=True)
    start = sum(counts[:place])
    answers = {
        "all_reduce": sum(wholes[1:], wholes[0]),
        "all_gather": np.concatenate([numbers(f"{kind} mine", each, (n, *TAILS[kind])) for each, n in rows]),
        "reduce_scatter": sum(wholes[1:], wholes[0])[start : start + counts[place]],
        "broadcast": wholes[0],
    }
    for other, each in enumerate(members):
        shape = (sent(kind, other, place), *TAILS[kind])
        answers[f"from {other}"] = numbers(f"{kind} to {place}", each, shape)
    return answers


def join(solution: str, device: str, rendezvous: Rendezvous) -> Communicator:
    ctx = KernelContext(device.partition(":")[0], torch.float32, {"collective": solution})
    ranks: Communicator = bind("collective", ctx).call(rendezvous)
    return ranks


def threads(world_size: int, act: Callable[[Communicator], Any], timeout_s: float = 60.0) -> list[Any]:
    """What each rank makes of it, by the reference; an error of one is an error here."""
    address = f"threads {next(NUMBERS)}"

    def one(rank: int) -> Any:
        ranks = join("reference", "cpu", Rendezvous(rank, world_size, address, "cpu", timeout_s))
        try:
            return act(ranks)
        finally:
            ranks.close()

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(world_size)]]


@contextlib.contextmanager
def process(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """This file as a program; gone afterwards."""
    command = [sys.executable, __file__, *map(str, arguments)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_threads_agree_with_numpy(world_size: int) -> None:
    for rank, answers in enumerate(threads(world_size, lambda ranks: play(ranks, "cpu"))):
        assert answers["words"] == tuple(f"rank {each}é" * each for each in range(world_size))
        for partition, (kind, dtype) in itertools.product(PARTITIONS[world_size], KINDS):
            for name, numpy_answer in expected(rank, partition, kind).items():
                answer = answers[f"{partition} {kind} {dtype} {name}"]
                assert answer.dtype is dtype
                np.testing.assert_array_equal(answer.double().numpy(), numpy_answer, f"{partition} {kind} {name}")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_threads_add_in_the_order_of_ranks(world_size: int) -> None:
    for rank, answers in enumerate(threads(world_size, lambda ranks: play(ranks, "cpu"))):
        for partition, size in itertools.product(PARTITIONS[world_size], (7, 40_001)):
            [members] = [each for each in partition if rank in each]
            total = fractions(members[0], size)
            for each in members[1:]:
                total = total + fractions(each, size)
            np.testing.assert_array_equal(answers[f"{partition} order {size}"].numpy(), total)


def play_in_turn(solution: str, rendezvous: Sequence[Rendezvous]) -> list[dict[str, Any]]:
    """All operations on the first communicator, and then on each other one a word, to see that it stands."""
    answers = []
    for each in rendezvous:
        ranks = join(solution, each.device, each)
        answers.append({"words": ranks.gather("again")} if answers else play(ranks, each.device))
        ranks.close()
        ranks.close()
    return answers


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, x in ours.items() if not same_bits(x, theirs[name])]


def same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return a.dtype is b.dtype and torch.equal(a, b)


def launcher_environment(rank: int, world_size: int, address: str) -> dict[str, str]:
    host, _, port = address.rpartition(":")
    found = {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return found | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}


def played_by_processes(
    solution: str, device: str, world_size: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """What every rank gets, this process being rank 0. One communicator comes after the other in each process: at two
    addresses of rank 0, and twice at the store of a launcher, for which a third one stands here."""
    stores, addresses = zip(*(open_store("127.0.0.1:0") for _ in range(3)), strict=True)
    with contextlib.ExitStack() as stack:
        children = []
        for rank in range(1, world_size):
            told = ("play", solution, device, rank, world_size, folder / str(rank), *addresses[:2], "-", "-")
            environment = launcher_environment(rank, world_size, addresses[2])
            children.append(stack.enter_context(process(*told, **environment)))
        for name, value in launcher_environment(0, world_size, addresses[2]).items():
            monkeypatch.setenv(name, value)
        places = [(addresses[0], stores[0]), (addresses[1], stores[1]), (None, None), (None, None)]
        rendezvous = [Rendezvous(0, world_size, address, device, 120, store) for address, store in places]
        everyone = [play_in_turn(solution, rendezvous)]
        for rank, child in enumerate(children, 1):
            assert child.wait(120) == 0
            everyone.append(torch.load(folder / str(rank)))
    for first, *others in everyone:
        assert first["words"] == tuple(f"rank {each}é" * each for each in range(world_size))
        assert others == [{"words": ("again",) * world_size}] * 3
    return [first for first, *_ in everyone]


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_agree_with_threads_in_every_bit(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = played_by_processes("gloo", "cpu", world_size, tmp_path, monkeypatch)
    for ours, theirs in zip(processes, threads(world_size, lambda ranks: play(ranks, "cpu")), strict=True):
        assert not differences(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_devices_agree_with_threads_but_for_the_order_of_sums(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} cuda devices")
    devices = played_by_processes("nccl", "cuda", world_size, tmp_path, monkeypatch)
    for ours, theirs in zip(devices, threads(world_size, lambda ranks: play(ranks, "cpu")), strict=True):
        assert not [name for name in differences(ours, theirs) if " order " not in name]
    for name in (f"{PARTITIONS[world_size][0]} order {size}" for size in (7, 40_001)):
        assert all(torch.equal(each[name], devices[0][name]) for each in devices)


@pytest.mark.parametrize("solution", ["gloo", "reference"])
def test_a_rank_alone_agrees_with_numpy_and_has_no_store(solution: str) -> None:
    ranks = join(solution, "cpu", Rendezvous(0, 1, "nowhere", "cpu", 60))
    assert not differences(play(ranks, "cpu"), threads(1, lambda ranks: play(ranks, "cpu"))[0])
    ranks.close()
    with pytest.raises(RankLostError, match="has closed"):
        ranks.gather("word")


@pytest.mark.parametrize("solution", ["gloo", "reference"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peer_never_comes_is_told(solution: str, rank: int) -> None:
    store, address = open_store("127.0.0.1:0")
    with pytest.raises(RankLostError, match=r"rank .*: wait timeout|waited for ranks"):
        join(solution, "cpu", Rendezvous(rank, 2, address, "cpu", 0.3, store if rank == 0 else None))


def test_processes_that_stay_silent_or_die_are_lost() -> None:
    """Rank 1 joins two communicators and then stands still, until it is killed."""
    (patient, short), addresses = zip(*(open_store("127.0.0.1:0") for _ in range(2)), strict=True)
    with process("stand", "gloo", "cpu", 1, 2, "-", *addresses) as child:
        dead = join("gloo", "cpu", Rendezvous(0, 2, addresses[0], "cpu", 1000, patient))
        silent = join("gloo", "cpu", Rendezvous(0, 2, addresses[1], "cpu", 3, short))
        lost_for_good(silent)
        child.kill()
        child.wait()
        lost_for_good(dead)


def lost_for_good(ranks: Communicator) -> None:
    group = ranks.group([range(2)])
    for call in (lambda: group.all_reduce(torch.ones(3)), lambda: group.all_gather(torch.ones(1), (1, 2))):
        with pytest.raises(RankLostError, match="rank 0"):
            call()
    with pytest.raises(RankLostError):
        ranks.gather("word")
    ranks.close()


def test_threads_that_stay_silent_or_leave_are_lost() -> None:
    done = threading.Event()

    def act(ranks: Communicator) -> None:
        if ranks.rank == 1:
            done.wait(60)
            return
        lost_for_good(ranks)
        done.set()

    threads(2, act, timeout_s=0.5)
    threads(2, lambda ranks: lost_for_good(ranks) if ranks.rank == 0 else None, timeout_s=1000)


def test_loss_spreads_through_groups() -> None:
    """Rank 2 leaves; rank 1 waits for it and rank 0 for rank 1 alone."""

    def act(ranks: Communicator) -> None:
        last = ranks.group([[0], [1, 2]])
        first = ranks.group([[0, 1], [2]])
        if ranks.rank == 1:
            with pytest.raises(RankLostError):
                last.all_reduce(torch.ones(1))
        if ranks.rank == 0:
            with pytest.raises(RankLostError):
                first.all_reduce(torch.ones(1))

    threads(3, act, timeout_s=1000)


def test_threads_say_when_their_calls_differ() -> None:
    def act(ranks: Communicator) -> None:
        group = ranks.group([range(2)])
        if ranks.rank == 0:
            group.all_reduce(torch.ones(3))
        else:
            group.all_gather(torch.ones(3), (3, 3))

    with pytest.raises((AssertionError, RankLostError), match=r"rank 1 calls|rank 0 calls|waited") as caught:
        threads(2, act)
    assert "all_gather" in str(caught.value) or isinstance(caught.value, RankLostError)


@pytest.mark.parametrize("solution", ["gloo", "reference"])
def test_members_that_do_not_part_the_ranks_are_refused(solution: str) -> None:
    ranks = join(solution, "cpu", Rendezvous(0, 1, None, "cpu", 60))
    for members in ([[0], [0]], [[0, 1]], []):
        with pytest.raises(AssertionError, match="does not part the ranks"):
            ranks.group(members)
    with pytest.raises(AssertionError):
        ranks.group([[0]]).all_gather(torch.ones(3), (2,))
    with pytest.raises(AssertionError):
        ranks.group([[0]]).reduce_scatter(torch.ones(3), (2,))


def test_a_store_listens_where_it_says_and_nowhere_else() -> None:
    _store, address = open_store("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match="in use"):
        open_store(address)
    _other, elsewhere = open_store(f"127.0.0.2:{port}")
    assert elsewhere == f"127.0.0.2:{port}"
    with pytest.raises(AssertionError, match="is not host:port"):
        open_store("localhost")


@pytest.mark.parametrize(("device", "runs"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_a_device_has_its_solution_and_the_others_say_why(device: str, runs: str) -> None:
    support = {each.name: each.supports(KernelContext(device, torch.float32)) for each in solutions_of("collective")}
    other = support[{"gloo": "nccl", "nccl": "gloo"}[runs]]
    assert isinstance(other, Reason)
    assert device in other.text
    if isinstance(support[runs], Reason):
        assert f"without {runs}" in support[runs].text


def main(mode: str, solution: str, device: str, *rest: str) -> None:
    """Join at each address in turn ("-" is the launcher's) and save the answers, or join all and stand still."""
    rank, world_size, answers, *addresses = rest
    places = [None if each == "-" else each for each in addresses]
    rendezvous = [Rendezvous(int(rank), int(world_size), place, device, 120) for place in places]
    if mode == "play":
        torch.save(play_in_turn(solution, rendezvous), answers)
        return
    standing = [join(solution, device, each) for each in rendezvous]
    sys.stdin.read()
    for ranks in standing:
        ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
