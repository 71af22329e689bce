# SPDX-License-Identifier: Apache-2.0
"""Which dialect a chat template is taken to speak: by lines of real templates, most of which hold marks of several, and
by whole templates, whose own calls have to be read back.
"""

from __future__ import annotations

import pytest

from published_templates import published_templates
from tokenspeed.chat import Message, Tool
from tokenspeed.chat.parsers import Context, choose, joined, names, opens_reasoning, resolve, tool_schemas
from tokenspeed.chat.template import ChatTemplate
from tokenspeed.core.errors import InvalidRequestError
from unit.chat.test_parsers_law import calls_of

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
    "step3": '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="a"></steptml:invoke><｜tool_call_end｜>',
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


# Whole templates.

PUBLISHED = {
    "apertus": ("Apertus-8B-Instruct",),
    "apriel": ("Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"),
    "cohere": ("Cohere2MoE", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
    "command_r": ("CohereForAI-c4ai-command-r-plus-tool_use",),
    "deepseek_dsml": ("deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek-ai-DeepSeek-V4"),
    "deepseek_v3": (
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "llama-cpp-deepseek-r1",
    ),
    "deepseek_v31": ("deepseek-ai-DeepSeek-V3.1",),
    "functionary_v31": ("meetkai-functionary-medium-v3.1",),
    "functionary_v32": ("meetkai-functionary-medium-v3.2",),
    "functools": ("fireworks-ai-llama-3-firefunction-v2",),
    "gemma4": ("google-gemma-4-31B-it-interleaved", "google-gemma-4-31B-it"),
    "gigachat": ("GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B"),
    "glm4": (
        "GLM-4.6",
        "GLM-4.7-Flash",
        "Spark2.5",
        "inclusionai-ling-3.0-flash",
        "poolside-Laguna-S-2.1",
        "poolside-Laguna-XS-2.1",
        "poolside-Laguna-XS.2",
    ),
    "gpt_oss": ("openai-gpt-oss-120b",),
    "granite3": ("ibm-granite-granite-3.3-2B-Instruct",),
    "hermes": (
        "Bielik-11B-v3.0-Instruct",
        "MiMo-VL",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Reka-Edge",
        "ibm-granite-granite-4.0",
        "ibm-granite-granite-4.1",
    ),
    "hunyuan_v3": ("tencent-Hy3",),
    "kimi_k2": ("Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"),
    "kimi_k3": ("Kimi-K3",),
    "lfm2": ("LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct"),
    "llama3_json": (
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
    ),
    "minicpm5": ("openbmb-MiniCPM5-1B",),
    "minimax_m2": ("MiniMax-M2",),
    "minimax_m3": ("MiniMax-M3",),
    "mistral": (
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "unsloth-mistral-Devstral-Small-2507",
    ),
    "muse_atem": ("muse-glimmer",),
    "nemotron_nano_v2": ("NVIDIA-Nemotron-Nano-v2",),
    "none": (
        "HuggingFaceTB-SmolLM3-3B",
        "google-gemma-2-2b-it",
        "llama-cpp-rwkv-world",
        "microsoft-Phi-3.5-mini-instruct",
    ),
    "qwen3_coder": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash"),
    "seed_oss": ("ByteDance-Seed-OSS",),
    "solar_open": ("upstage-Solar-Open-100B",),
    "tool_calls_list": ("MiniMax-M1",),
}

TELL_NOTHING = {  # templates that show no calls, or refuse this conversation
    *("HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct", "google-gemma-2-2b-it", "llama-cpp-rwkv-world"),
    *("ibm-granite-granite-3.3-2B-Instruct", "microsoft-Phi-3.5-mini-instruct", "Kimi-K2-Instruct"),
    *("Kimi-K2-Thinking", "CohereForAI-c4ai-command-r-plus-tool_use", "llama-cpp-deepseek-r1"),
}
ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "</s>",
        "<eos>",
        "<|end_of_msg|>",
        "<seed:eos>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    *("[e~[", "<|eot|>", "<|eom|>", "<｜end▁of▁sentence｜>", "<turn|>", "<|end_of_text|>", "<end_of_sentence>"),
    *("<SPECIAL_12>", "<|assistant_end|>", "<｜hy_eos:opensource｜>", "<|endoftext|>", "<|user|>", "<|observation|>"),
    *("<sep>", "<|role_end|>", "<|message_sep|>", "</assistant>"),
)
FUNCTION = {
    "name": "ls_dir",
    "description": "Lists a folder.",
    "parameters": {
        "type": "object",
        "properties": {
            "p": {"type": "string", "description": "a path"},
            "n": {"type": "integer", "description": "how many"},
            "rows": {"type": "array", "items": {"type": "number"}, "description": "which"},
            "meta": {
                "type": "object",
                "description": "more",
                "properties": {"a": {"type": "array", "items": {"type": "string"}}},
            },
        },
        "required": ["p"],
    },
}
TOOLS: list[Tool] = [{"type": "function", "function": FUNCTION}]
CALL = ("ls_dir", {"p": "/srv/é 🚆 a_b\n  <x> {y}: [z]", "n": 3, "rows": [1, 2.5], "meta": {"a": ["b", "c"]}})


def reply_of(source: str, thinks: bool) -> tuple[str, bool]:
    """What a template writes of a reply that calls, and whether its prompt has opened reasoning."""
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": CALL[0], "arguments": CALL[1]}}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    if thinks:
        said = {**said, "reasoning_content": "I see."}
    user: Message = {"role": "user", "content": "go"}
    switches = {"enable_thinking": thinks, "thinking": thinks, "functions": "[]", "datetime": "now"}
    prompt = template.render([user], TOOLS, True, **switches)
    whole = template.render([user, said], TOOLS, False, **switches)
    same = (one == other for one, other in zip(prompt, whole, strict=False))
    end = next((at for at, is_same in enumerate(same) if not is_same), len(prompt))
    mark = prompt.rfind("<", 0, end) if end < len(prompt) else -1
    if mark >= 0 and ">" not in prompt[mark:end]:  # the two part inside of a mark
        end = mark
    reply = whole[end:].rstrip()
    while reply.endswith(ENDS):
        reply = reply[: -max(len(mark) for mark in ENDS if reply.endswith(mark))].rstrip()
    return reply, opens_reasoning(whole[:end])


@pytest.mark.models
def test_every_published_template_says_its_dialect() -> None:
    expected = {template: name for name, templates in PUBLISHED.items() for template in templates}
    assert {template: choose(source) for template, source in published_templates().items()} == expected


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("thinks", [False, True])
def test_what_a_published_template_writes_is_read_back(thinks: bool) -> None:
    num_read = 0
    for template, source in published_templates().items():
        try:
            reply, starts = reply_of(source, thinks)
        except InvalidRequestError:
            assert template in TELL_NOTHING, template
            continue
        context = Context(tools=tool_schemas(TOOLS), starts_in_reasoning=starts)
        parser = resolve(choose(source))(context)
        deltas = joined([delta for char in reply for delta in parser.feed(char)] + parser.finish())
        assert (calls_of(deltas) == [CALL]) == (template not in TELL_NOTHING), (template, reply, deltas)
        num_read += template not in TELL_NOTHING
    assert num_read >= 58
