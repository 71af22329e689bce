# SPDX-License-Identifier: Apache-2.0
"""Device code of the solution `gluon`. Knows no launch shapes."""
