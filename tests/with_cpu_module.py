# SPDX-License-Identifier: Apache-2.0
"""pytest with another build of the compiled CPU kernels: `python tests/with_cpu_module.py MODULE.so ARGUMENTS`."""

from __future__ import annotations

import importlib.util
import sys

import pytest

NAME = "tokenspeed.kernels._cpu"


def main(path: str, arguments: list[str]) -> int:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None, path
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
