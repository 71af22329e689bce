# SPDX-License-Identifier: Apache-2.0
"""Who computes what, and what is exchanged: a static compiler over the placements that models declare.

mesh: ranks and groups · placement: layouts, moves, the token table · declare, graph: what a model states ·
cost, routes, compiler: the choice · program: the plan, checked by type · step, executor: one rank's run of it ·
interpreter: all ranks in one process, the oracle · shards: weights.
Does not know model families, kernels or requests.
"""
