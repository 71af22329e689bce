# SPDX-License-Identifier: Apache-2.0
"""Who computes what, and what is exchanged: a static compiler over the placements that models declare.

mesh: ranks and groups · placement: layouts, moves, the token table · declare, graph: what a model states ·
cost, routes, compiler: the choice · program: the plan, checked by type · interpreter: its CPU twin · shards: weights.
Does not know model families, kernels or requests.
"""
