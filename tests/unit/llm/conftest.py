# SPDX-License-Identifier: Apache-2.0
"""Lets this room's tests import tests/fakes.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
