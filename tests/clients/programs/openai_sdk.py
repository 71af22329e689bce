# SPDX-License-Identifier: Apache-2.0
"""The openai SDK through a task of two calls: streamed, then whole, then what a typed helper makes of it.

Runs in the clients' environment: openai_sdk.py URL MODEL TASK
"""

import json
import subprocess
import sys

from openai import OpenAI

url, model, task = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
tools = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def ask(messages, stream):
    """One reply as a message of the SDK."""
    if not stream:
        return client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0]
    options = {"include_usage": True}
    with client.chat.completions.stream(model=model, messages=messages, tools=tools, stream_options=options) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0]


for stream in (True, False):
    messages = [{"role": "user", "content": task}]
    choice = ask(messages, stream)
    while choice.message.tool_calls:
        assert choice.finish_reason == "tool_calls", choice
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            command = json.loads(call.function.arguments)["command"]
            printed = subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
            messages.append({"role": "tool", "tool_call_id": call.id, "content": printed})
        choice = ask(messages, stream)
    assert choice.finish_reason == "stop", choice
    print(choice.message.content)
assert model in [card.id for card in client.models.list()]
