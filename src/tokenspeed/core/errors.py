# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can cause and mend. A bug is an assertion, never one of these.

TokenSpeedError
├── StartError                 one line on stderr, non-zero exit; nothing is served
│   ├── ConfigError            a flag or a combination of flags
│   ├── ModelNotFoundError     no such path, alias or hub id
│   ├── UnsupportedModelError  architecture, tensor type or feature; names what is supported
│   ├── CheckpointError        corrupt, truncated, missing or surplus tensors
│   ├── TokenizerError         missing or unknown tokenizer
│   ├── CapacityError          KV pool or memory too small; carries the numbers
│   └── PortInUseError         the address is taken
├── RequestError               400 with `param` and `code`; only this request ends
│   ├── InvalidRequestError    a field is wrong
│   ├── ContextLengthError     prompt longer than the window; carries both counts
│   └── CapacityExceededError  can never fit the KV pool; carries both counts
├── OverloadedError            429 with Retry-After
└── EngineDeadError            the engine process ended; 503, with Retry-After where it will be back
"""

from __future__ import annotations


class TokenSpeedError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one line fit for a user."""


class StartError(TokenSpeedError):
    """The engine cannot start; the message says what is wrong and what would be right."""


class ConfigError(StartError):
    """A flag, or a combination of flags, is wrong."""


class ModelNotFoundError(StartError):
    """No such path, alias or hub id."""


class UnsupportedModelError(StartError):
    """The model needs something this build does not have."""


class CheckpointError(StartError):
    """Weight files are corrupt, truncated, incomplete or do not match the model."""


class TokenizerError(StartError):
    """The tokenizer is missing or of an unknown kind."""


class CapacityError(StartError):
    """Memory or KV pool too small to serve one request."""


class PortInUseError(StartError):
    """The listening address is taken."""


class RequestError(TokenSpeedError):
    """One request is refused; `param` names the field and `code` is the machine-readable reason."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A field of the request is wrong."""


class ContextLengthError(RequestError):
    """The prompt does not fit the context window. can_grow: that is less than the model is made for."""

    code = "context_length_exceeded"

    def __init__(
        self,
        num_prompt_tokens: int,
        max_model_len: int,
        param: str = "messages",
        *,
        is_lower_bound: bool = False,
        can_grow: bool = False,
    ) -> None:
        longer = " or start the server with a longer context (--max-model-len)" if can_grow else ""
        at_least = "at least " if is_lower_bound else ""
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, of which one must be left for the answer, "
            f"but the prompt has {at_least}{num_prompt_tokens} tokens; shorten the prompt{longer}.",
            param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class CapacityExceededError(RequestError):
    """The request can never fit the KV pool, however idle the server is."""

    code = "kv_capacity_exceeded"

    def __init__(self, num_needed_tokens: int, num_kv_tokens: int, param: str = "messages") -> None:
        super().__init__(
            f"The request needs {num_needed_tokens} tokens of KV cache, but the whole pool holds "
            f"{num_kv_tokens}; shorten the prompt or start the server with a larger pool.",
            param,
        )
        self.num_needed_tokens = num_needed_tokens
        self.num_kv_tokens = num_kv_tokens


class OverloadedError(TokenSpeedError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(TokenSpeedError):
    """The engine has ended, and what it ran is lost. retry_after_s: by then a new one could serve, if one is started;
    None when it was ended on purpose."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


START_ERRORS: dict[str, type[StartError]] = {
    error.__name__: error
    for error in (
        StartError,
        ConfigError,
        ModelNotFoundError,
        UnsupportedModelError,
        CheckpointError,
        TokenizerError,
        CapacityError,
        PortInUseError,
    )
}
