# SPDX-License-Identifier: Apache-2.0
"""Look-ups in the sandbox find, and refuse, what jinja's own sandbox does."""

from __future__ import annotations

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed.chat.jinja_sandbox import sandbox

MESSAGE = {"role": "user", "items": "own", "_hidden": "h", "content": " text ", "calls": [{"name": "f"}], "n": 3}
EXPRESSIONS = [
    "m.role",
    "m.absent",
    "m.absent is defined",
    "m.absent.deeper",
    "m['role']",
    "m['absent']",
    "m.items",
    "m.items()",
    "m['items']",
    "m.keys() | list",
    "m._hidden",
    "m.__class__",
    "m['__class__']",
    "m.pop",
    "m.pop('role')",
    "m.update({'a': 1})",
    "m.get('role')",
    "m.get('absent') is none",
    "m.content.strip()",
    "m.content.strip",
    "m.content.format",
    "m.content.format(1)",
    "m.content.__len__",
    "m.calls[0].name",
    "m.calls.append(1)",
    "m.calls.append",
    "m.calls[9].name",
    "m.n.real",
    "m.n.__class__",
    "m.items | attr('__class__')",
    "m | attr('pop')",
]


def outcome(environment: jinja2.Environment, expression: str) -> str:
    template = environment.from_string("{% for x in [1, 2] %}{{ " + expression + " }};{% endfor %}")
    try:
        text = template.render(m=dict(MESSAGE))
    except (jinja2.TemplateError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return text.split(" at 0x")[0]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_look_up_is_as_in_jinjas_own_sandbox(expression: str) -> None:
    assert outcome(sandbox(), expression) == outcome(ImmutableSandboxedEnvironment(), expression)


def test_what_was_judged_for_one_type_says_nothing_of_another() -> None:
    template = sandbox().from_string("{% for x in xs %}{{ x.index is defined }}{{ x.append is defined }};{% endfor %}")
    assert template.render(xs=["text", [3], {}, {"append": 1}, "text"]) == (
        "TrueFalse;TrueFalse;FalseFalse;FalseTrue;TrueFalse;"
    )


def test_what_is_judged_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.chat.jinja_sandbox._NUM_JUDGED_MAX", 2)
    environment = sandbox()
    template = environment.from_string("{{ m.strip() }}{{ m.upper() }}{{ m.lower() }}{{ m.title() }}{{ m.title() }}")
    assert template.render(m="a ") == "aA a A A "
    assert len(environment._safe) == 2  # type: ignore[attr-defined]
