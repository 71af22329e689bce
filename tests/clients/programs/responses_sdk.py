# SPDX-License-Identifier: Apache-2.0
"""The openai SDK's Responses API through a task of two calls: streamed with the whole history, then whole with what the
server has kept.

Runs in the clients' environment: responses_sdk.py URL MODEL TASK
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
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        "strict": False,
    }
]


def outputs_of(response):
    """What the commands of a response print, as items."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": run(json.loads(call.arguments)["command"])}
        for call in calls
    ]


def run(command):
    """What a command prints."""
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def streamed(items):
    """The answer to these items."""
    with client.responses.stream(model=model, input=items, tools=tools, store=False) as events:
        for _ in events:
            pass
        return events.get_final_response()


items = [{"role": "user", "content": task}]
response = streamed(items)
while outputs := outputs_of(response):
    items += [item.model_dump(exclude_none=True) for item in response.output] + outputs
    response = streamed(items)
print(response.output_text)

response = client.responses.create(model=model, input=task, tools=tools)
while outputs := outputs_of(response):
    response = client.responses.create(model=model, input=outputs, tools=tools, previous_response_id=response.id)
print(response.output_text)
assert client.responses.retrieve(response.id).output_text == response.output_text
client.responses.delete(response.id)
assert client.responses.input_tokens.count(model=model, input=task).input_tokens > 0
