# SPDX-License-Identifier: Apache-2.0
"""Text ⇄ tokens, and requests to and from the engine. Torch-free. Knows no wire dialect and no scheduling."""
