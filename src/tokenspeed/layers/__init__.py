# SPDX-License-Identifier: Apache-2.0
"""Maths that two or more model families share, on one device. Layers bind ops; models are made of layers.

Knows tensors, ops, and that the tensors of a checkpoint have names. Does not know configurations of families, the names
a family uses, or requests.
Dimensions: T tokens, D hidden, H query heads, G K/V heads, K head dimension, F feed-forward, N outputs, V vocabulary,
P positions of a table, S sampled tokens.
"""
