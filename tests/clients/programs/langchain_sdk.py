# SPDX-License-Identifier: Apache-2.0
"""langchain-openai through a task of two calls, whole and streamed.

Runs in the clients' environment: langchain_sdk.py URL MODEL TASK
"""

import subprocess
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model, task = sys.argv[1:]


@tool
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


for streaming in (False, True):
    chat = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="any", max_retries=0, streaming=streaming, stream_usage=True
    )
    bound = chat.bind_tools([bash])
    messages = [HumanMessage(task)]
    message = bound.invoke(messages)
    while message.tool_calls:
        messages.append(message)
        messages += [ToolMessage(bash.invoke(call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
        message = bound.invoke(messages)
    print(message.content)
