# SPDX-License-Identifier: Apache-2.0
"""litellm through a task of two calls, by two dialects.

Runs in the clients' environment: litellm_sdk.py URL MODEL TASK
"""

import json
import subprocess
import sys

import litellm

url, model, task = sys.argv[1:]
litellm.suppress_debug_info = True
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
for name, base in ((f"openai/{model}", f"{url}/v1"), (f"anthropic/{model}", url)):
    messages = [{"role": "user", "content": task}]
    while True:
        answer = litellm.completion(
            model=name, api_base=base, api_key="any", messages=messages, tools=tools, num_retries=0
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            command = json.loads(call.function.arguments)["command"]
            printed = subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
            messages.append({"role": "tool", "tool_call_id": call.id, "content": printed})
    print(message.content)
