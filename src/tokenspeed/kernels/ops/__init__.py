# SPDX-License-Identifier: Apache-2.0
"""One folder an op: `__init__` is the contract, `cases` generates inputs for tests, every other file is a solution."""
