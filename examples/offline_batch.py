# SPDX-License-Identifier: Apache-2.0
"""Complete a batch of prompts without a server."""

from tokenspeed import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Two plus two is", "A haiku has three"]

if __name__ == "__main__":
    with LLM("smollm2-135m") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt!r} → {output.outputs[0].text!r} ({output.cached_len} tokens cached)")
