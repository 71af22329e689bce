# SPDX-License-Identifier: Apache-2.0
"""An opened model as plain data. Knows nothing of where its parts came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.checkpoints import JsonObject, Script, SourceFile, TokenizerSource, Weights


@dataclass(slots=True)
class OpenedModel:
    """A ModelSource. open_weights is called on each `weights()`, so that opening a model maps no tensor."""

    path: Path
    config: JsonObject
    generation_config: JsonObject
    tokenizer: TokenizerSource | None
    chat_template: str | None
    open_weights: Callable[[], Weights]
    script: Script | None = None
    file: SourceFile | None = None

    def weights(self) -> Weights:
        """The tensors, mapped now."""
        return self.open_weights()
