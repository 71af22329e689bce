# SPDX-License-Identifier: Apache-2.0
"""How templates render calls, for each dialect, and the marks of its reasoning: what tests of parsers are made from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

Call = tuple[str, Mapping[str, object]]

TOOLS: dict[str, Mapping[str, object]] = {
    "ls_dir": {"type": "object", "properties": {"p": {"type": "string"}, "n": {"type": "integer"}}, "required": ["p"]},
    "edit": {
        "type": "object",
        "properties": {
            "old text": {"type": "string"},
            "lines": {"type": "array"},
            "flag": {"type": ["boolean", "null"]},
            "meta": {"type": "object"},
        },
    },
}


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {dumps(a)}}}\n</tool_call>' for n, a in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def glm4(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{n}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{bare(v)}</arg_value>\n" for k, v in a.items())
        + "</tool_call>"
        for n, a in calls
    )


def minimax_m2(calls: Sequence[Call]) -> str:
    invokes = (
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{bare(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>\n"
        for n, a in calls
    )
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def kimi_k2(calls: Sequence[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    each = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def gpt_oss(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>" for n, a in calls
    )


def llama3_json(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "; ".join(f'{{"name": "{n}", "parameters": {dumps(a)}}}' for n, a in calls)


def slug(key: str) -> str:
    return key.replace(" ", "_")


def python_list(calls: Sequence[Call]) -> str:
    each = (f"{n}({', '.join(f'{slug(k)}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(each)}]"


def llama_pythonic(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{python_list(calls)}<|python_end|>"


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def none(calls: Sequence[Call]) -> str:
    return f"```json\n{dumps([{'name': n, 'arguments': a} for n, a in calls])}\n```"


# Families of later templates.


def seed_oss(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>{bare(v)}</parameter>\n" for k, v in a.items())
        + "</function>\n</seed:tool_call>"
        for n, a in calls
    )


def deepseek_dsml(calls: Sequence[Call]) -> str:
    each = (
        f'<｜DSML｜invoke name="{n}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">{bare(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in a.items()
        )
        + "</｜DSML｜invoke>\n"
        for n, a in calls
    )
    return f"<｜DSML｜tool_calls>\n{''.join(each)}</｜DSML｜tool_calls>"


def step3(calls: Sequence[Call]) -> str:
    each = (
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{n}">'
        + "".join(f'<steptml:parameter name="{k}">{bare(v)}</steptml:parameter>' for k, v in a.items())
        + "</steptml:invoke><｜tool_call_end｜>"
        for n, a in calls
    )
    return f"<｜tool_calls_begin｜>\n{''.join(each)}<｜tool_calls_end｜>"


def hunyuan_v3(calls: Sequence[Call]) -> str:
    tags = "tool_call|tool_calls|tool_sep|arg_key|arg_value"
    each = (
        f"<tool_call>{n}<tool_sep>\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>\0{i}\0</arg_value>\n" for i, k in enumerate(a))
        + "</tool_call>\n"
        for n, a in calls
    )
    text = re.sub(rf"<(/?)({tags})>", r"<\1\2:opensource>", f"<tool_calls>\n{''.join(each)}</tool_calls>")
    values = iter([bare(v) for _, a in calls for v in a.values()])
    return re.sub(r"\0\d+\0", lambda _: next(values), text)


def objects(calls: Sequence[Call], name: str = "name", arguments: str = "arguments") -> list[str]:
    return [f'{{"{name}": "{n}", "{arguments}": {dumps(a)}}}' for n, a in calls]


def nemotron_nano_v2(calls: Sequence[Call]) -> str:
    return f"<TOOLCALL>[{', '.join(objects(calls))}]</TOOLCALL>"


def tool_calls_list(calls: Sequence[Call]) -> str:
    return "<tool_calls>\n" + "".join(f"{one}\n" for one in objects(calls)) + "</tool_calls>"


def apriel(calls: Sequence[Call]) -> str:
    return f"<tool_calls>[{', '.join(objects(calls))}]</tool_calls>"


def granite3(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(objects(calls))}]"


def functools(calls: Sequence[Call]) -> str:
    return f"functools[{', '.join(objects(calls))}]"


def internlm2(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in objects(calls, arguments="parameters")
    )


def gigachat(calls: Sequence[Call]) -> str:
    return "".join(f"<|function_call|>{one}" for one in objects(calls))


def ernie45(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls))


def cohere(calls: Sequence[Call]) -> str:
    each = ",\n".join(
        f'    {{"tool_call_id": "{i}", ' + one[1:] for i, one in enumerate(objects(calls, "tool_name", "parameters"))
    )
    return f"<|START_ACTION|>[\n{each}\n]<|END_ACTION|>"


def command_r(calls: Sequence[Call]) -> str:
    return f"Action:\n```json\n[\n{', '.join(objects(calls, 'tool_name', 'parameters'))}\n]```"


def lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{python_list(calls)}<|tool_call_end|>"


def apertus(calls: Sequence[Call]) -> str:
    return f"<|tools_prefix|>[{', '.join(f'{{{dumps(n)}: {dumps(a)}}}' for n, a in calls)}]<|tools_suffix|>"


def functionary_v31(calls: Sequence[Call]) -> str:
    return "".join(f"<function={n}>{dumps(a)}</function>" for n, a in calls)


def functionary_v32(calls: Sequence[Call]) -> str:
    return "".join(f">>>{n}\n{dumps(a)}" for n, a in calls)


def minicpm5(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<function name="{n}">'
        + "".join(
            f'<param name="{k}">{f"<![CDATA[{v}]]>" if isinstance(v, str) else dumps(v)}</param>' for k, v in a.items()
        )
        + "</function>"
        for n, a in calls
    )


def muse_atem(calls: Sequence[Call]) -> str:
    return "<|eom|>".join(
        f'<|start|>assistant to={n}<|message|><atem:function_calls>\n<atem:invoke name="{n}">\n'
        + "".join(f'<atem:parameter name="{k}">{bare(v)}</atem:parameter>\n' for k, v in a.items())
        + "</atem:invoke>\n</atem:function_calls>"
        for n, a in calls
    )


def solar_open(calls: Sequence[Call]) -> str:
    each = (
        f"<|tool_call:begin|>a1b2c3d4e{i}<|tool_call:name|>{n}<|tool_call:args|>{dumps(a)}<|tool_call:end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|begin|>assistant<|tool_calls|>{''.join(each)}<|calls|>"


KINDS = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def kimi_k3(calls: Sequence[Call]) -> str:
    each = (
        f'<|open|>call tool="{n}" index="{i}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{k}" type="{KINDS.get(type(v), "null")}"<|sep|>{bare(v)}<|close|>argument<|sep|>'
            for k, v in a.items()
        )
        + "<|close|>call<|sep|>"
        for i, (n, a) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{''.join(each)}<|close|>tools<|sep|><|close|>message<|sep|>"


def gemma4_value(value: object, quote_keys: bool = False) -> str:
    quote = '<|"|>'
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote}{k}{quote}:{gemma4_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma4_value, value))}]"
    return dumps(value)


def gemma4(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{n}{{{','.join(f'{k}:{gemma4_value(v)}' for k, v in a.items())}}}<tool_call|>"
        for n, a in calls
    )


def minimax_m3_value(value: object) -> str:
    mark = "]<]minimax[>["
    if isinstance(value, dict):
        return "".join(f"{mark}<{k}>{minimax_m3_value(v)}{mark}</{k}>" for k, v in value.items())
    if isinstance(value, list):
        return "".join(f"{mark}<item>{minimax_m3_value(v)}{mark}</item>" for v in value)
    return bare(value)


def minimax_m3(calls: Sequence[Call]) -> str:
    mark = "]<]minimax[>["
    each = (f'{mark}<invoke name="{n}">{minimax_m3_value(a)}{mark}</invoke>\n' for n, a in calls)
    return f"{mark}<tool_call>\n{''.join(each)}{mark}</tool_call>"


RENDER: dict[str, Callable[[Sequence[Call]], str]] = {
    render.__name__: render
    for render in (
        *(apertus, apriel, cohere, command_r, deepseek_dsml, deepseek_v3, deepseek_v31, ernie45, functionary_v31),
        *(functionary_v32, functools, gemma4, gigachat, glm4, gpt_oss, granite3, hermes, hunyuan_v3, internlm2),
        *(kimi_k2, kimi_k3, lfm2, llama3_json, llama_pythonic, minicpm5, minimax_m2, minimax_m3, mistral, muse_atem),
        *(nemotron_nano_v2, none, qwen3_coder, seed_oss, solar_open, step3, tool_calls_list),
    )
}
THINK = {
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "hunyuan_v3": ("<think:opensource>", "</think:opensource>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "muse_atem": ("to=self<|message|>", "<|eom|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "solar_open": ("<|think|>", "<|end|>"),
}
SILENT = {  # what is read and says nothing
    "apertus": ("<|inner_suffix|>",),
    "apriel": ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    "cohere": ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "ernie45": ("<response>", "</response>"),
    "functionary_v32": ("all\n",),
    "gemma4": ("<|tool_response>",),
    "gigachat": ("<|message_sep|>",),
    "granite3": ("<response>", "</response>"),
    "kimi_k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    "muse_atem": ("<|message|>", "<|eom|>", "<|eot|>"),
    "solar_open": ("<|begin|>assistant", "<|content|>", "<|tool_calls|>", "<|calls|>", "<|end|>"),
    "tool_calls_list": ("<answer>", "</answer>"),
}


def thinks(name: str) -> tuple[str, str]:
    """What opens and closes reasoning."""
    return THINK.get(name, ("<think>", "</think>"))


EXAMPLE: Sequence[Call] = (
    ("ls_dir", {"p": 'a "b" \\ <é\n🚆', "n": -1}),
    ("edit", {"old text": "x\n", "lines": [1.5, {"k": None}], "flag": True, "meta": {}}),
)
