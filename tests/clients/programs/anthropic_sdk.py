# SPDX-License-Identifier: Apache-2.0
"""The anthropic SDK through a task of two calls: streamed by hand, then by its tool runner, which would keep the
conversation on the server and has to be told that it cannot.

Runs in the clients' environment: anthropic_sdk.py URL MODEL TASK
"""

import subprocess
import sys

from anthropic import Anthropic, beta_tool

url, model, task = sys.argv[1:]
client = Anthropic(base_url=url, api_key="any", max_retries=0)


@beta_tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: what to run
    """
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def text_of(message):
    """The text of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


def by_hand(messages):
    """The last message of a streamed conversation."""
    while True:
        with client.messages.stream(model=model, max_tokens=4096, messages=messages, tools=[bash.to_dict()]) as events:
            message = events.get_final_message()
        if message.stop_reason != "tool_use":
            return message
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": bash(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


first = [{"role": "user", "content": task}]
print(text_of(by_hand(list(first))))
runner = client.beta.messages.tool_runner(model=model, max_tokens=4096, messages=first, tools=[bash])
print(text_of(runner.until_done()))
assert client.messages.count_tokens(model=model, messages=first).input_tokens > 0
