# SPDX-License-Identifier: Apache-2.0
"""The outputs of a stream put together, as a client does it that takes them one by one."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tokenspeed.llm.outputs import CompletionOutput, RequestOutput


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The outputs of one stream as a single, whole one."""
    deltas: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for completion in output.outputs:
            deltas.setdefault(completion.index, []).append(completion)
    return replace(
        outputs[-1],
        outputs=tuple(_joined_completion(deltas[index]) for index in sorted(deltas)),
        prompt_logprobs=next((each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None), None),
    )


def _joined_completion(deltas: Sequence[CompletionOutput]) -> CompletionOutput:
    last = deltas[-1]
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=None if last.logprobs is None else logprobs,
    )
