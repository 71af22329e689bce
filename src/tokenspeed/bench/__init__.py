# SPDX-License-Identifier: Apache-2.0
"""Load generators and demonstrations. Those that speak HTTP are pure clients and know nothing of the engine."""
