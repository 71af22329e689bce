# SPDX-License-Identifier: Apache-2.0
"""The nouns that rooms pass to each other. Torch-free; imports nothing else of this package."""
