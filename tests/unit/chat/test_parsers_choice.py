# SPDX-License-Identifier: Apache-2.0
"""Which dialect a chat template is taken to speak: by lines of real templates, most of which hold marks of several."""

from __future__ import annotations

import pytest

from tokenspeed.chat.parsers import choose, names

TEMPLATES = {
    "hermes": 'within <tool_call></tool_call> XML tags: {"name": <function-name>, "arguments": <args-json-object>}',
    "qwen3_coder": "<tool_call>\n<function=' ~ call.name ~ '>\n<parameter=' ~ key ~ '>",
    "glm4": '<tool_call>{{ "name" }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="tool-name">\n<parameter name="key">',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments | tojson",
    "gpt_oss": "<|start|>assistant<|channel|>commentary to=functions.{{ name }}<|message|>",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value}',
    "llama_pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2)]",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "none": "<|im_start|>{{ role }}\n{{ content }}<|im_end|>",
    "apertus": "set tool_calls_token = '<|tools_prefix|>' -%}{%- set end_tool_calls_token = '<|tools_suffix|>' -%}",
    "apriel": "within <tool_call></tool_call> XML tags: <tool_calls>[{'name': ...}]</tool_calls> [BEGIN "
    "FINAL RESPONSE]",
    "cohere": "write <|START_ACTION|> followed by a list of JSON-formatted tool calls, close it out with "
    "<|END_ACTION|>",
    "command_r": "Write 'Action:' followed by a json-formatted list of actions {\"tool_name\": title of the tool}",
    "deepseek_dsml": "{%- set dsml_token = '｜DSML｜' -%}'<' + dsml_token + 'function_calls>\\n<' + dsml_token + "
    "'invoke",
    "ernie45": '<tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call> <response>\\n\' + text + '
    "'</response>",
    "functionary_v31": "'<function=' + name + '>' + arguments | tojson + '</function>' "
    "<function=example_function_name>{",
    "functionary_v32": "Respond in this format:\\n>>>${recipient}\\n${content} '>>>all\\n' + message['content']",
    "functools": 'a single JSON list formatted as functools[{"name": [function name], "arguments": [arguments '
    "as JSON]}]",
    "gemma4": "'<|tool_call>call:' + function['name'] + '{' + '<|\"|>' + argument + '<|\"|>' '}<tool_call|>'",
    "gigachat": "role_sep='<|role_sep|>\\n', message_sep='<|message_sep|>\\n\\n', function_call='<|function_call|>'",
    "granite3": "respond only with <|tool_call|> followed by a JSON list of tools used. '<|start_of_role|>assistant'",
    "hunyuan_v3": "set HYTK = ':opensource' %} '<tool_calls{}>'.format(HYTK) '<tool_sep{}>'.format(HYTK) '<arg_key{}>'",
    "internlm2": '\'<|action_start|><|plugin|>\\n{"name": "\' + name + \'", "parameters": \' + parameters + '
    "'}<|action_end|>'",
    "kimi_k3": "'<|open|>' + tag + '<|sep|>' '<|close|>' + tag + '<|sep|>' {%- macro xtml_type(value) -%}",
    "lfm2": "'<|tool_call_start|>[' + (tool_calls | join(', ')) + ']<|tool_call_end|>'",
    "minicpm5": '<function name="function-name"><param name="param-name">param-value</param></function>',
    "minimax_m3": "set ns_token = ']<]minimax[>[' toolcall_begin_token = ns_token ~ '<tool_call>' ns_token ~ "
    "'</tool_call>' think_begin_token = '<mm:think>' ns_token + '<invoke name=\"' + name "
    "'<response>' ~ text ~ '</response>'",
    "muse_atem": "'<|start|>assistant to=self<|message|>' '<atem:function_calls>\\n<atem:invoke name=\"' + name",
    "nemotron_nano_v2": '<TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]</TOOLCALL>',
    "seed_oss": "<seed:tool_call>\\n<function=name>\\n<parameter=key>value</parameter>\\n</function>\\n</seed:too"
    "l_call> set think_begin_token = '<seed:think>'",
    "solar_open": "<|tool_call:begin|><tool-call-id><|tool_call:name|><tool-name><|tool_call:args|><args><|tool"
    "_call:end|>",
    "tool_calls_list": '<tool_calls>\\n{"name": <tool-name>, "arguments": <args-json-object>}\\n...\\n</tool_calls>',
}
ALSO = [  # other lines, and what they must not be taken for
    ("lfm2", 'ns.system_prompt + "List of tools: <|tool_list_start|>["'),
    ("lfm2", 'keep_past_thinking = keep_past_thinking | default(false) ("\\n" if x else "") + "List of tools: ["'),
    ("cohere", "<|START_ACTION|>[\\n{'tool_call_id': '0', \"tool_name\": \"a\"}]<|END_ACTION|> ```json Action: write"),
    ("functools", "'<|' + role + '|>' + content + '<|tool|>' + tools + '<|/tool|>' + '<|end|>'"),
    ("hermes", "<tools>{{ tool | tojson }}</tools> <tool_call>{'name': x}</tool_call> <tool_response>"),
    ("qwen3_coder", "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1"),
    ("qwen3_coder", "'<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>' + '</function>\\n</tool_call>'"),
    ("glm4", "'<tool_call>' + tc.name '<arg_key>' ~ k ~ '</arg_key><arg_value>' ~ v ~ '</arg_value></tool_call>'"),
    ("mistral", "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS] '[TOOL_CALLS]' ~ name ~ '[ARGS]' [THINK] [/THINK]"),
    (
        "deepseek_v3",
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name '\\n```json\\n'",
    ),
    ("none", "'<start_of_turn>' + role + '\\n' + content | trim + '<end_of_turn>\\n'"),
    ("none", "'User: ' + content + '\\n\\nAssistant: <think>\\n</think>'"),
]


@pytest.mark.parametrize("name", names())
def test_the_template_says_the_dialect(name: str) -> None:
    assert choose(TEMPLATES[name]) == name


@pytest.mark.parametrize(("name", "line"), ALSO)
def test_other_templates_say_the_dialect(name: str, line: str) -> None:
    assert choose(line) == name
