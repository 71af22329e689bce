# SPDX-License-Identifier: Apache-2.0
"""Stream two answers at once from one model inside an event loop."""

import asyncio

from tokenspeed import AsyncLLM, SamplingParams
from tokenspeed.core.config import EngineConfig, ModelConfig
from tokenspeed.llm.input_processor import ChatPrompt


async def ask(llm: AsyncLLM, question: str) -> None:
    """Collect one answer and print it."""
    text = ""
    params = SamplingParams(temperature=0.0, max_tokens=48)
    async for output in llm.generate(ChatPrompt([{"role": "user", "content": question}]), params):
        text += output.outputs[0].text
    print(f"{question}\n  {text}")


async def main() -> None:
    """Both questions run in the same batch."""
    llm = await AsyncLLM.start(EngineConfig(model=ModelConfig(model="smollm2-135m")))
    try:
        await asyncio.gather(ask(llm, "What is a prime number?"), ask(llm, "What is a palindrome?"))
    finally:
        await llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
