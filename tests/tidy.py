# SPDX-License-Identifier: Apache-2.0
"""The words and sizes that keep each line in its room. Pure: (path in the package, text) → faults."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
KERNEL_FUNCTION_LINES_MAX = 150
CORE_ROOMS = ("core", "observability", "control", "execution", "engine", "llm", "layers", "spmd", "kernels")
NO_ROOM_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}

FAMILIES = r"\b(llama|qwen|gemma|mistral|mixtral|deepseek|kimi|glm|minimax|gpt_?oss|phi\d|smollm|olmo)"
VENDORS = r"\b(sm_?\d{2}|hopper|blackwell|ampere|flashinfer|flash_attn|cutlass|cudnn|avx\d*|vnni|amx)\b"
MESH = r"torch\.distributed|\b(tp|ep|dp|pp)_(size|rank|group)\b"


@dataclass(frozen=True, slots=True)
class Words:
    """A pattern that may stand only in some places. `strings` also looks at string literals, not only at code."""

    pattern: str
    allowed: tuple[str, ...]
    why: str
    strings: bool = False


WORDS = (
    Words(MESH, ("spmd/", "kernels/ops/collective/"), "collectives and mesh axes live in spmd"),
    Words(VENDORS, ("kernels/",), "architectures and vendor libraries live in kernels", strings=True),
    Words(FAMILIES, ("models/", "chat/", "checkpoints/", "bench/"), "a model family is named only where it is defined"),
    Words(r"\basyncio\b", ("llm/", "server/", "bench/"), "asyncio stays above the engine"),
    Words(r"\bos\.(environ|getenv)\b", ("core/config.py",), "only core/config.py reads the environment"),
)


def faults(path: str, text: str) -> Iterator[str]:
    """Every fault of one module; `path` is relative to the package, such as `core/plan.py`."""
    tree = ast.parse(text)
    for rule in (_names, _sizes, _words, _constructs):
        yield from rule(path, text, tree)


def _names(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    if PurePosixPath(path).stem in NO_ROOM_NAMES:
        yield f"{path}: a file of this name is no room"
    if not text.startswith("# SPDX-License-Identifier: Apache-2.0\n"):
        yield f"{path}: the first line is not the SPDX header"
    if not ast.get_docstring(tree):
        yield f"{path}: no module docstring"


def _sizes(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    num_lines = text.count("\n")
    if num_lines > FILE_LINES_MAX:
        yield f"{path}: {num_lines} lines, at most {FILE_LINES_MAX}"
    limit = KERNEL_FUNCTION_LINES_MAX if path.startswith("kernels/ops/") else FUNCTION_LINES_MAX
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {limit}"


def _words(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    code = _code_words(tree, strings=False)
    code_and_strings = _code_words(tree, strings=True)
    for rule in WORDS:
        if path.startswith(rule.allowed):
            continue
        for line, word in code_and_strings if rule.strings else code:
            if re.search(rule.pattern, word, re.IGNORECASE):
                yield f"{path}:{line}: {word[:60]!r}: {rule.why}"


def _code_words(tree: ast.Module, *, strings: bool) -> list[tuple[int, str]]:
    """Identifiers, dotted attributes and imports, and string literals that are not docstrings when asked for."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            words.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            words.extend((node.lineno, f"{module}.{alias.name}".strip(".")) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            words.append((node.lineno, node.name))
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.append((node.lineno, node.value))
    return words


def _is_call_of(name: str) -> Callable[[ast.AST], bool]:
    return lambda node: isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _constructs(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    if not path.startswith(tuple(f"{room}/" for room in CORE_ROOMS)):
        return
    banned = {
        "hasattr probing": _is_call_of("hasattr"),
        "print": _is_call_of("print"),
        "bare except": lambda node: isinstance(node, ast.ExceptHandler) and node.type is None,
    }
    for node in ast.walk(tree):
        for what, is_fault in banned.items():
            if is_fault(node):
                yield f"{path}:{getattr(node, 'lineno', 0)}: {what} in a core room"
