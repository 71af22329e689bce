# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201
"""Shows that each deliberate fault of the control plane is caught.

A fault is a patch beside this file, named for what it does. Each is applied to a copy of csrc/control under
build/mutants, never to the working tree; then the native tests, the traps, the count of allocations and the simulator
run. Prints a line a fault, with all that caught it, and at the end `N mutants, M caught`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "mutants"
TREE = BUILD / "tree"
BINARIES = BUILD / "out"
CONTROL = Path("csrc") / "control"
TIMEOUT_S = 600


def refresh_tree() -> None:
    """The copy equals the working tree; files that did not change keep their time, so they are not built again."""
    wanted = {path.relative_to(ROOT) for path in (ROOT / CONTROL).rglob("*") if path.suffix in (".h", ".cc")}
    for path in wanted:
        put(TREE / path, (ROOT / path).read_bytes())
    for path in list((TREE / CONTROL).rglob("*")):
        if path.is_file() and path.relative_to(TREE) not in wanted:
            path.unlink()
    put(TREE / "CMakeLists.txt", (HERE / "CMakeLists.txt").read_bytes())


def put(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def build(jobs: int) -> str | None:
    """What the compiler said where it refused."""
    command = ["cmake", "--build", str(BINARIES), "-j", str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stdout + done.stderr


def apply(patch: Path) -> None:
    # Outside of a repository as far as git is concerned, so that it applies to the copy.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(TREE.parent)}
    subprocess.run(["git", "apply", str(patch)], cwd=TREE, env=environment, check=True)


class Faulty:
    """The copy with one fault in it. Leaving restores sources and objects as they were, so nothing is built twice."""

    def __init__(self, patch: Path) -> None:
        self._patch = patch
        names = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)
        self._sources = [TREE / name for name in names]
        self._saved: list[tuple[Path, Path]] = []

    def __enter__(self) -> None:
        for source in self._sources:
            objects = list(BINARIES.rglob(f"{source.name}.o")) if source.suffix == ".cc" else []
            for path in [source, *objects]:
                saved = path.with_name(path.name + ".sound")
                shutil.copy2(path, saved)
                self._saved.append((path, saved))
        apply(self._patch)

    def __exit__(self, *_: object) -> None:
        for path, saved in self._saved:
            saved.replace(path)
            if path.suffix == ".o":
                path.touch()  # the archive takes it in again


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """None where it did not end in time."""
    command = [str(BINARIES / name), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, errors="replace")
    except subprocess.TimeoutExpired:
        return None


def catchers(seeds: int) -> list[str]:
    """Who sees that something is wrong."""
    found = []
    for name in ("tests", "traps", "allocations"):
        done = run(f"control_{name}")
        if done is None:
            found.append(f"{name} (no end)")
        elif done.returncode != 0:
            failed = re.search(r"FAILED (\S+?):", done.stdout)
            found.append(f"{name} ({failed[1]})" if failed and name == "traps" else name)
    done = run("control_sim", "--seeds", str(seeds))
    if done is None:
        found.append("simulator (no end)")
    elif done.returncode != 0:
        seed = re.search(r"^seed (\d+)", done.stdout + done.stderr, re.MULTILINE)
        found.append(f"simulator (seed {seed[1]})" if seed else "simulator")
    return found


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of at least 1, not {text!r}")
    return int(text)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mutants: {message}\n")


def asked_for() -> argparse.Namespace:
    """What the command line asks for; a name that is no fault ends the program."""
    parser = Parser(description=__doc__)
    parser.add_argument("--seeds", type=at_least_one, default=300, help="seeds that the simulator runs for each")
    parser.add_argument("--jobs", type=at_least_one, default=2)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, without .patch")
    options = parser.parse_args()
    known = {path.stem for path in HERE.glob("*.patch")}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)} (they are the patches in {HERE.relative_to(ROOT)})")
    return options


def main() -> int:
    options = asked_for()
    patches = [path for path in sorted(HERE.glob("*.patch")) if not options.names or path.stem in options.names]
    refresh_tree()
    configure = ["cmake", "-S", str(TREE), "-B", str(BINARIES)]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    refused = build(options.jobs)
    if refused is not None:
        print(refused)
        return 1
    sound = catchers(options.seeds)
    if sound:
        print(f"without a fault already: {', '.join(sound)}")
        return 1
    num_caught = 0
    for patch in patches:
        with Faulty(patch):
            found = ["compiler"] if build(options.jobs) is not None else catchers(options.seeds)
        num_caught += bool(found)
        print(f"{patch.stem:44} {'caught by ' + ', '.join(found) if found else 'SURVIVED'}", flush=True)
    print(f"{len(patches)} mutants, {num_caught} caught")
    return 0 if num_caught == len(patches) else 1


if __name__ == "__main__":
    sys.exit(main())
