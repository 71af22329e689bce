# SPDX-License-Identifier: Apache-2.0
"""pydantic-ai through a task of two calls, whole and streamed.

Runs in the clients' environment: pydantic_ai_sdk.py URL MODEL TASK
"""

import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model, task = sys.argv[1:]
agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any")))


@agent.tool_plain
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


async def drained(_, events):
    """Makes the agent stream."""
    async for _ in events:
        pass


print(agent.run_sync(task).output)
print(agent.run_sync(task, event_stream_handler=drained).output)
