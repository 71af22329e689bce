# SPDX-License-Identifier: Apache-2.0
"""Attention of a decode step: the new token's K and V are written by who attends them."""
