# SPDX-License-Identifier: Apache-2.0
"""`python -m tokenspeed`: the command line, for whoever starts modules, such as a launcher of ranks."""

from __future__ import annotations

import sys

from tokenspeed.cli import main

if __name__ == "__main__":
    sys.exit(main())
