# SPDX-License-Identifier: Apache-2.0
"""Turns a StepPlan into tokens: owns the weights, the KV pages and all per-seat state on the device.

Knows neither who planned the step nor what a request says; sequences are seats here.
"""

from tokenspeed.execution.model_runner import ModelRunner
from tokenspeed.execution.outputs import PromptLogprobs, RunnerInfo, StepHandle, StepOutput

__all__ = ["ModelRunner", "PromptLogprobs", "RunnerInfo", "StepHandle", "StepOutput"]
