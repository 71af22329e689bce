# SPDX-License-Identifier: Apache-2.0
"""What an operator sees: log lines, metrics, progress and facts about the machine.

Knows counters, durations and names; knows no HTTP, no asyncio, no model and no engine.
"""
