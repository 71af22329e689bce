# SPDX-License-Identifier: Apache-2.0
"""Stop strings in streamed text, at a cost linear in its length.

Text goes through an Aho-Corasick automaton. Its state is the longest end of the text so far that begins a stop string,
which is exactly what must be held back. Knows no tokens and no request.
"""

from __future__ import annotations

from collections import deque


class _Node:
    """A beginning of one or more stop strings; `longest` is the longest stop string that ends here."""

    __slots__ = ("depth", "fail", "longest", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fail: _Node = self
        self.longest: str | None = None


class StopScanner:
    """Finds the first of several stop strings.

    The first is the one that is complete first, whatever the cuts between feeds; of several that end at the same
    character it is the longest, so that nothing of it is sent. With `include` the output ends with the stop string,
    else before it.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        assert all(stop), f"an empty stop string would stop at once: {stop!r}"
        self._root = _automaton(stop)
        self._node = self._root
        self._includes = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that may be sent, the stop string that was found). After a match everything is swallowed."""
        if self.matched is not None:
            return "", self.matched
        node, root = self._node, self._root
        for end, character in enumerate(text, start=1):
            while character not in node.next and node is not root:
                node = node.fail
            node = node.next.get(character, root)
            if node.longest is not None:
                return self._match(self._held + text[:end], node.longest)
        self._node = node
        text = self._held + text
        keep = 0 if self._includes else node.depth
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, once the text has ended without a match."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _match(self, text: str, stop: str) -> tuple[str, str]:
        self.matched = stop
        self._held = ""
        return (text if self._includes else text[: len(text) - len(stop)]), stop


def _automaton(stop: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for string in stop:
        node = root
        for character in string:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.longest = string
    queue = deque(root.next.values())
    for node in queue:
        node.fail = root
    while queue:
        node = queue.popleft()
        for character, child in node.next.items():
            fail = node.fail
            while character not in fail.next and fail is not root:
                fail = fail.fail
            child.fail = fail.next.get(character, root)
            child.longest = child.longest or child.fail.longest
            queue.append(child)
    return root
