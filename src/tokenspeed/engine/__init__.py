# SPDX-License-Identifier: Apache-2.0
"""The engine: when steps run, and the process they run in. Knows no text, no wire dialect and no tensor."""
