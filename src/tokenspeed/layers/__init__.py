# SPDX-License-Identifier: Apache-2.0
"""Maths that two or more model families share, on one device. Layers bind ops; models are made of layers.

Knows tensors and ops. Does not know checkpoints, configurations of families, or requests.
Dimensions: T tokens, D hidden, H query heads, G K/V heads, K head dimension, F feed-forward, N outputs, V vocabulary,
P positions of a table, S sampled tokens.
"""
