# SPDX-License-Identifier: Apache-2.0
"""`python -m tokenspeed.cli`: the command line."""

from __future__ import annotations

import sys

from tokenspeed.cli import main

if __name__ == "__main__":
    sys.exit(main())
