# SPDX-License-Identifier: Apache-2.0
"""What holds a reply to its form: calls as the model's dialect writes them, the answer that was asked for, reasoning
within its budget.

Knows conversations and dialects by their contracts; knows neither masks nor wire fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from tokenspeed.chat.parsers import CallFormat, call_format, opens_reasoning, reasoning_marks, tagged_format
from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import Grammar, Lead, ThinkingBudget
from tokenspeed.grammar import SchemaError, Tag, Tags, as_text, fit_schema
from tokenspeed.server.chat import Conversation
from tokenspeed.server.formats import Form, tags_grammar
from tokenspeed.server.served import Served
from tokenspeed.server.tagged_arguments import tagged_lark

_ANY_DIALECT = "none"
"""Its form of a call is understood in every dialect."""
_OBJECT_KINDS = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")


def needs_constraint(served: Served, conversation: Conversation) -> bool:
    """Whether there is anything to hold the reply to; working it out may take a while."""
    wants = conversation.form is not None or conversation.choice.must_call or conversation.thinking_budget is not None
    return wants or (bool(conversation.callable_tools) and served.config.tool_grammar == "on")


def constrain(served: Served, conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """The conversation with what holds its reply, and what of its schemas is not enforced. Raises InvalidRequestError
    that names the tool and the place in its schema."""
    opening = ""
    if conversation.add_generation_prompt:
        opening = served.llm.input_processor.reply_opening(conversation.template_kwargs)
    schemas, warnings = _schemas(conversation)
    grammar, sound = _grammar(served, conversation, schemas)
    params = conversation.params
    if grammar is not None:
        params = msgspec.structs.replace(params, grammar=led(served, grammar, opening))
    if conversation.thinking_budget is not None:
        params = msgspec.structs.replace(params, thinking=_budget(served, conversation.thinking_budget, opening))
    if conversation.form is not None:
        warnings += tuple(f"{path} is not enforced" for path in conversation.form.unenforced)
    if served.llm.source.script is not None:  # a script says what it says
        return conversation, warnings
    return replace(conversation, params=params, sound_calls=sound), warnings


def _grammar(served: Served, conversation: Conversation, schemas: Mapping[str, str]) -> tuple[Grammar | None, bool]:
    """What the reply has to match, and whether calls in it are well formed."""
    form, choice = conversation.form, conversation.choice
    if choice.must_call:
        if not schemas:
            raise InvalidRequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
        names = tuple(schemas) if choice.called is None else (choice.called,)
        if names[0] not in schemas:
            raise InvalidRequestError(f"tool_choice names {names[0]!r}, which is none of the tools", "tool_choice")
        is_one = choice.called is not None or not conversation.parallel_tool_calls
        return tags_grammar(_calls(served.dialect, {name: schemas[name] for name in names}, is_one)).grammar, True
    if form is not None and not schemas:
        return _answer(served.dialect, form), False
    if form is not None:
        if form.grammar.kind != "json_schema":
            return form.grammar, False
        calls = _calls(served.dialect, schemas, not conversation.parallel_tool_calls)
        return tags_grammar(msgspec.structs.replace(calls, instead=form.grammar.source)).grammar, True
    if not schemas or served.config.tool_grammar == "off":
        return None, False
    forms = call_format(served.dialect, schemas) or tagged_format(served.dialect, schemas) or ()
    tags = [_tag(form, schemas[form.name]) for form in forms if not form.ambiguous]
    return (tags_grammar(Tags(tuple(tags))).grammar, True) if tags else (None, False)


def _calls(dialect: str, schemas: Mapping[str, str], is_one: bool) -> Tags:
    """Nothing but calls, in the first form of the dialect, or in the form that all understand."""
    formats = call_format(dialect, schemas) or tagged_format(dialect, schemas) or call_format(_ANY_DIALECT, schemas)
    assert formats, f"the form that every dialect understands is missing ({dialect})"
    firsts: dict[str, CallFormat] = {}
    for form in formats:
        firsts.setdefault(form.name, form)
    one = formats[0]
    return Tags(
        tuple(_tag(form, schemas[name]) for name, form in firsts.items()),
        has_text=False,
        num_max=1 if is_one else None,
        opening=one.opening,
        parting=one.parting,
        closing=one.closing,
    )


def _tag(form: CallFormat, schema: str) -> Tag:
    lark = (
        None if form.tagged is None else tagged_lark(msgspec.json.decode(schema, type=dict[str, object]), form.tagged)
    )
    return Tag(form.trigger, form.begin, form.end, schema, lark, form.number_end)


def _answer(dialect: str, form: Form) -> Grammar:
    """The answer's form, with what the dialect puts before an answer."""
    before = reasoning_marks(dialect).answer
    if not before or form.grammar.kind != "json_schema":
        return form.grammar
    return tags_grammar(Tags((Tag(before, before, "", form.grammar.source),), has_text=False, num_max=1)).grammar


def led(served: Served, grammar: Grammar, opening: str) -> Grammar:
    """With the reasoning that the prompt, which ends with `opening`, has opened, or that the model may open itself."""
    marks = reasoning_marks(served.dialect)
    if opens_reasoning(opening):
        return msgspec.structs.replace(grammar, lead=Lead(marks.close))
    is_free = grammar.kind == "tags" and msgspec.json.decode(grammar.source, type=Tags).has_text
    if is_free or marks.open not in (served.llm.input_processor.template_text or ""):
        return grammar
    return msgspec.structs.replace(grammar, lead=Lead(marks.close, marks.open))


def _budget(served: Served, num_tokens: int, opening: str) -> ThinkingBudget:
    """Counted from where the reasoning opens."""
    marks, tokenizer = reasoning_marks(served.dialect), served.llm.tokenizer
    open_ids = tokenizer.encode(marks.open, add_special_tokens=False)
    close_ids = tokenizer.encode(marks.close + marks.answer, add_special_tokens=False)
    return ThinkingBudget(num_tokens, opens_reasoning(opening), tuple(open_ids), tuple(close_ids))


def _schemas(conversation: Conversation) -> tuple[dict[str, str], tuple[str, ...]]:
    """The schema of the arguments of each tool, as far as it can be enforced, and what of it cannot."""
    schemas: dict[str, str] = {}
    warnings: list[str] = []
    for tool in conversation.callable_tools:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            continue
        name = str(function.get("name"))
        try:
            fitted = fit_schema(_arguments(function.get("parameters")), strict=function.get("strict") is True)
        except SchemaError as error:
            place = f"parameters.{error.path}" if error.path else "parameters"
            raise InvalidRequestError(f"tool {name!r}, {place}: {error}", "tools") from None
        schemas[name] = as_text(fitted.schema)
        warnings += _unenforced(name, fitted.unenforced)
    return schemas, tuple(warnings)


def _unenforced(name: str, paths: Sequence[str]) -> list[str]:
    return [f"tool {name!r}: parameters.{path} is not enforced" for path in paths]


def _arguments(parameters: object) -> Mapping[str, object]:
    """Arguments are an object, whether the schema says so or not."""
    schema: Mapping[str, object] = parameters if isinstance(parameters, Mapping) else {}
    return schema if any(key in schema for key in _OBJECT_KINDS) else {"type": "object", **schema}
