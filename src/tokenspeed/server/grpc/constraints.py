# SPDX-License-Identifier: Apache-2.0
"""What a gateway wants a reply held to, as a grammar of the engine, with the reasoning that may come before it.

Knows the forms that gateways write; knows no mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import Grammar
from tokenspeed.grammar import Tag, Tags
from tokenspeed.server.constraints import led
from tokenspeed.server.formats import FormatFields, form_of, json_form, tags_form, tags_grammar
from tokenspeed.server.served import Served

_TAIL_LEN = 32
_PARAM = "structural_tag"
_FORMS = {"json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "ebnf"}
"""(field of the message, field of FormatFields)"""


def grammar_of(sampling: Any, prompt_ids: Sequence[int], served: Served) -> Grammar | None:
    """The grammar that the sampling parameters ask for. Raises InvalidRequestError."""
    name = sampling.WhichOneof("constraint")
    if name is None:
        return None
    text = getattr(sampling, name)
    if name == _PARAM:
        grammar = _tags(text)
    else:
        form = form_of(FormatFields(**{_FORMS[name]: text}))
        assert form is not None, f"{name} was given"
        grammar = form.grammar
    if served.llm.source.script is not None:  # a script says what it says
        return None
    opening = served.llm.tokenizer.decode(prompt_ids[-_TAIL_LEN:], skip_special_tokens=False)
    return led(served, grammar, opening)


def _tags(text: str) -> Grammar:
    """Stretches of a form in free text; where one must come, the reply is nothing but such stretches."""
    try:
        asked = json.loads(text)
    except ValueError:
        raise InvalidRequestError(f"{_PARAM} is no JSON", _PARAM) from None
    form = asked.get("format", asked) if isinstance(asked, dict) else None
    if not isinstance(form, dict):
        raise InvalidRequestError(f"{_PARAM} is no object with a format", _PARAM)
    if "structures" in form:
        return tags_form(form, _PARAM).grammar
    tags, triggers = form.get("tags"), form.get("triggers")
    if form.get("type") != "triggered_tags" or not isinstance(tags, list) or not isinstance(triggers, list) or not tags:
        raise InvalidRequestError(
            f"{_PARAM}: only the format triggered_tags is supported, with tags and triggers", _PARAM
        )
    must_come = form.get("at_least_one") is True
    return tags_grammar(
        Tags(
            tuple(_tag(tag, triggers, f"{_PARAM}.tags[{index}]") for index, tag in enumerate(tags)),
            has_text=not must_come,
            num_max=1 if must_come and form.get("stop_after_first") is True else None,
        )
    ).grammar


def _tag(tag: object, triggers: Sequence[object], place: str) -> Tag:
    fields: Mapping[str, Any] = tag if isinstance(tag, dict) else {}
    content = fields.get("content")
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise InvalidRequestError(f"{place}.content: only the type json_schema is supported", _PARAM)
    begin, end, schema = str(fields.get("begin") or ""), str(fields.get("end") or ""), content.get("json_schema")
    trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
    if trigger is None:
        raise InvalidRequestError(f"{place}.begin begins with none of the triggers", _PARAM)
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{place}.content.json_schema is no object", _PARAM)
    return Tag(trigger, begin, end, json_form(schema, f"{place}.content.json_schema").grammar.source)
