# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter needs here: loops whose bounds are tensors.

It asks numpy for the integer that an array of one number holds, which numpy 2.4 refuses.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_and_index
