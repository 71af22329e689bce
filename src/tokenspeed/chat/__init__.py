# SPDX-License-Identifier: Apache-2.0
"""How models write conversations down: rendering here, the dialects that read them back beside it. Torch-free.

`template` renders a conversation into prompt text. Knows the text side only: no token, no wire format, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping

Message = Mapping[str, object]
"""One message in the shape of the OpenAI chat API: role, content, tool_calls, tool_call_id, reasoning_content, name."""

Tool = Mapping[str, object]
"""One tool in the shape of the OpenAI chat API: {"type": "function", "function": {name, description, parameters}}."""
