# SPDX-License-Identifier: Apache-2.0
"""Builds llama.cpp for this processor, once, in an environment of its own, for bench/cpu/compare.py.

`install_peer.py FOLDER` leaves FOLDER/venv, the log of the build in FOLDER/build.log and a stamp, FOLDER/.installed.
Ends with 3, and one line that says why, where llama.cpp cannot be built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

EXIT_CODE = 3
PINS = Path(__file__).with_name("pins.txt")
LIBRARY_ONLY = PINS.with_name("library_only.cmake")
_SOURCE = "llama-cpp-python"
_NEEDED = (("cmake", "install CMake 3.24 or newer"), ("g++", "install gcc 12 or newer"))
_TELLING = ("error", "fatal", "not found", "no matching")

Run = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Runs a command with these additions to the environment, its output into a log. Returns the exit code."""


def install(folder: Path, run: Run, which: Callable[[str], str | None] = shutil.which) -> str | None:
    """Make the environment. Returns why it could not be made."""
    for tool, remedy in _NEEDED:
        if which(tool) is None:
            return f"{tool} is missing: {remedy}"
    folder.mkdir(parents=True, exist_ok=True)
    log, python = folder / "build.log", folder / "venv" / "bin" / "python"
    log.write_text("")
    make = [sys.executable, "-m", "venv", str(folder / "venv")]
    if not python.exists() and run(make, {}, log) != 0:
        return _failure("its environment could not be made", log)
    # From source, for this processor: a built package is for the least of them. Niced, since it takes many minutes.
    options = [
        "--disable-pip-version-check",
        "install",
        "--verbose",
        "--no-binary",
        _SOURCE,
        "--requirement",
        str(PINS),
    ]
    settings = ["-DGGML_NATIVE=ON", "-DCMAKE_BUILD_TYPE=Release", "-DLLAVA_BUILD=OFF"]
    settings += [f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={LIBRARY_ONLY}"]
    environment = {"CMAKE_ARGS": " ".join(settings)}
    environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(len(os.sched_getaffinity(0)))
    if run(["nice", "-n", "10", str(python), "-m", "pip", *options], environment, log) != 0:
        return _failure("pip could not build it", log)
    if run([str(python), "-c", "import llama_cpp, numpy; llama_cpp.llama_backend_init()"], {}, log) != 0:
        return _failure("it was built and cannot be loaded", log)
    (folder / ".installed").touch()
    return None


def _failure(what: str, log: Path) -> str:
    """What went wrong, the line of the log that says most of it, and where the log is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in _TELLING)] or lines
    return f"{what}: {telling[-1] if telling else 'it said nothing'} (all of it: {log})"


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    with log.open("ab") as output:
        done = subprocess.run(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    return done.returncode


def main(arguments: Sequence[str], run: Run = _run) -> int:
    """Returns the exit code."""
    (folder,) = arguments
    print("bench-cpu: building llama.cpp for this processor, once (ten minutes on two cores)", flush=True)
    reason = install(Path(folder), run)
    if reason is not None:
        print(
            f"bench-cpu: llama.cpp could not be built, so there is nothing to compare with: {reason}", file=sys.stderr
        )
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
