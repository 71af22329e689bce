# SPDX-License-Identifier: Apache-2.0
"""An opened model as plain data. Knows nothing of where its parts came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenspeed.checkpoints import JsonObject, Script, SourceFile, TokenizerSource, Weights


@dataclass
class OpenedModel:
    """A ModelSource. open_weights is called on each `weights()`, so that opening a model maps no tensor; the others
    that give something once it is asked for: who runs a model needs no tokenizer."""

    path: Path
    config: JsonObject
    read_generation_config: Callable[[], JsonObject]
    read_tokenizer: Callable[[], TokenizerSource | None]
    chat_template: str | None
    open_weights: Callable[[], Weights]
    script: Script | None = None
    file: SourceFile | None = None

    @cached_property
    def generation_config(self) -> JsonObject:
        """Read now, at first. Raises CheckpointError."""
        return self.read_generation_config()

    @cached_property
    def tokenizer(self) -> TokenizerSource | None:
        """Read now, at first. Raises CheckpointError."""
        return self.read_tokenizer()

    def weights(self) -> Weights:
        """The tensors, mapped now."""
        return self.open_weights()
