# SPDX-License-Identifier: Apache-2.0
"""Flags of vLLM and SGLang that are not here, each with what to do instead. docs/compatibility.md shows this table."""

from __future__ import annotations

REFUSED = {
    "--enable-auto-tool-choice": "calls are always read; leave it out",
    "--reasoning-parser": "--tool-call-parser reads reasoning too",
    "--disable-radix-cache": "use --no-prefix-caching",
    "--enable-chunked-prefill": "always on; leave it out",
    "--chunked-prefill-size": "--max-num-batched-tokens bounds a step",
    "--tokenizer": "the model's own is used; leave it out",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--quantization": "what a checkpoint holds is read from it; leave it out",
    "--pipeline-parallel-size": "use --tp, --ep, --dp-attention",
    "--pp-size": "use --tp, --ep, --dp-attention",
    "--data-parallel-size": "use --dp-attention, or several servers behind a gateway",
    "--dp-size": "use --dp-attention, or several servers behind a gateway",
    "--enable-expert-parallel": "use --ep N",
    "--speculative-config": "there is no speculative decoding",
    "--speculative-algorithm": "there is no speculative decoding",
    "--enable-lora": "there are no adapters; serve a merged model",
    "--enforce-eager": "use --no-graphs",
    "--disable-cuda-graph": "use --no-graphs",
    "--disable-overlap-schedule": "use --overlap-depth 0",
    "--attention-backend": "use --kernel OP=SOLUTION",
    "--grammar-backend": "there is one; leave it out",
    "--enable-hierarchical-cache": "use --host-kv-tokens N",
    "--schedule-policy": "requests run by their priority, then in order of arrival; leave it out",
    "--generation-config": "the model's generation_config.json is used",
    "--seed": "seed is a field of each request",
    "--random-seed": "seed is a field of each request",
    "--enable-metrics": "always at /metrics; leave it out",
    "--disable-log-requests": "a request is one line without its text; leave it out",
}
