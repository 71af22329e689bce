# SPDX-License-Identifier: Apache-2.0
"""Ops: contracts with several solutions each, chosen once when a model is built.

Knows tensors and machines. Does not know models, requests or what a step is.
"""
