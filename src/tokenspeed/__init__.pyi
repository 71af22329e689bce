# SPDX-License-Identifier: Apache-2.0
from tokenspeed.core.request import SamplingParams as SamplingParams
from tokenspeed.llm.async_llm import AsyncLLM as AsyncLLM
from tokenspeed.llm.llm import LLM as LLM

__version__: str
