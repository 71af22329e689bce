# SPDX-License-Identifier: Apache-2.0
"""Talk to a running server (`make serve`) with the openai package: pip install openai."""

from openai import OpenAI

if __name__ == "__main__":
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three primary colours."}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} prompt, {chunk.usage.completion_tokens} generated]")
