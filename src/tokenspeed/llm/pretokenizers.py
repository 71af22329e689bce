# SPDX-License-Identifier: Apache-2.0
"""The pre-tokenizers that GGUF files name: how text is cut before byte-level BPE merges it.

Each is what the published tokenizer.json of the model does. Patterns apply one after the other, each within the pieces
that the one before left, and cut out their matches. A new name is one more line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """whole_words: a piece that is itself a token is taken whole, without going through the merges."""

    patterns: tuple[str, ...]
    whole_words: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CJK = r"[一-龥ࠀ-一가-퟿]+"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(digits: str, ending: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT2_PRE = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), whole_words=True)
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),))
_GPT4O = PreTokenizer((_o200k(r"\p{N}{1,3}", f"{_CONTRACTION}?"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "mellum"), _GPT2_PRE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "smaug-bpe"), PreTokenizer(_LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "qwen35": PreTokenizer((_QWEN35,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "tekken": PreTokenizer((_o200k(r"\p{N}", ""),), whole_words=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK_V3)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
}
