# SPDX-License-Identifier: Apache-2.0
"""Prompts and parameters: rendering, encoding, every bound, what is filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from fakes import BOS, EOS, VOCAB_SIZE, FakeSource, byte_tokenizer, engine_info, script
from tokenspeed.core.config import EngineConfig, ModelConfig
from tokenspeed.core.errors import (
    CapacityExceededError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    RequestError,
)
from tokenspeed.core.request import PRIORITY_ABS_MAX, EngineRequest, SamplingParams, unpack_ids
from tokenspeed.llm.input_processor import (
    EXACT_CHARS_MAX,
    ChatPrompt,
    InputProcessor,
    ProcessedRequest,
    Prompt,
    TextPrompt,
    TokensPrompt,
    default_sampling,
)

HELLO = TextPrompt("hello")


def processor(source: FakeSource | None = None, config: EngineConfig | None = None, **info: object) -> InputProcessor:
    return InputProcessor(source or FakeSource(), byte_tokenizer(), engine_info(**info), config or EngineConfig())


def process(prompt: Prompt = HELLO, processor: InputProcessor = processor(), **fields: object) -> ProcessedRequest:  # noqa: B008
    return processor.process(prompt, SamplingParams(**fields), request_id="r")  # type: ignore[arg-type]


def only(request: ProcessedRequest) -> EngineRequest:
    (sequence,) = request.sequences
    return sequence


def test_text_gets_one_bos() -> None:
    assert process().prompt_token_ids == (BOS, *b"hello")
    assert process(TextPrompt("<bos>hello")).prompt_token_ids == (BOS, *b"hello")
    assert process(TextPrompt("hello", add_special_tokens=False)).prompt_token_ids == (*b"hello",)


def test_a_chat_is_rendered_and_gets_no_second_bos() -> None:
    request = process(ChatPrompt([{"role": "user", "content": "hi"}]))
    assert request.prompt_token_ids == (BOS, *b"[user]hi>")


def test_template_kwargs_may_turn_the_generation_prompt_off_but_not_replace_messages() -> None:
    source = FakeSource(chat_template="{{ x }}{% if add_generation_prompt %}>{% endif %}")
    messages: list[Mapping[str, object]] = [{"role": "user", "content": "hi"}]
    with_kwargs = ChatPrompt(messages, template_kwargs={"x": "abc", "add_generation_prompt": False})
    assert process(with_kwargs, processor(source)).prompt_token_ids == (*b"abc",)
    with pytest.raises(InvalidRequestError):
        process(ChatPrompt(messages, template_kwargs={"messages": []}), processor(source))


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        process(ChatPrompt([{"role": "user", "content": "hi"}]), processor(FakeSource(chat_template=None)))
    assert caught.value.param == "messages"


def test_the_operators_template_wins(tmp_path: object) -> None:
    config = EngineConfig(model=ModelConfig(chat_template="!{{ messages[0].content }}"))
    prompt = ChatPrompt([{"role": "user", "content": "hi"}])
    assert process(prompt, processor(config=config)).prompt_token_ids == (*b"!hi",)
    with pytest.raises(ConfigError, match="no-such-file"):
        processor(config=EngineConfig(model=ModelConfig(chat_template="/no-such-file")))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TokensPrompt([-1]), "prompt"),
        (TokensPrompt([VOCAB_SIZE]), "prompt"),
        (TokensPrompt([10**30]), "prompt"),
        (TokensPrompt([]), "prompt"),
        (TokensPrompt(["a"]), "prompt"),  # type: ignore[list-item]
        (TextPrompt("", add_special_tokens=False), "prompt"),
        (ChatPrompt([]), "messages"),
    ],
)
def test_prompts_that_are_no_prompts(prompt: Prompt, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        process(prompt)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("n", 0),
        ("n", 129),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", 7),
        ("stop_token_ids", (VOCAB_SIZE,)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", ((VOCAB_SIZE, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
    ],
)
def test_every_parameter_has_bounds(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        process(**{field: value})
    assert caught.value.param == field
    assert "\n" not in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        process(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_shapes_that_callers_in_python_use_are_taken() -> None:
    params = process(stop="end", logit_bias={5: 1}, stop_token_ids=[7], top_k=-1, temperature=1).params
    assert (params.stop, params.logit_bias, params.stop_token_ids, params.top_k) == (("end",), ((5, 1.0),), (7,), 0)


@pytest.mark.parametrize(("stop", "tells_at_end"), [((), True), (("x",), False)])
def test_a_stop_string_needs_tokens_as_they_come(stop: tuple[str, ...], tells_at_end: bool) -> None:
    request = processor().process(HELLO, SamplingParams(stop=stop), request_id="r", tells_at_end=True)
    assert only(request).tells_at_end is tells_at_end
    assert not only(processor().process(HELLO, SamplingParams(), request_id="r")).tells_at_end


def test_max_tokens_is_cut_to_the_window() -> None:
    assert only(process()).sampling.max_tokens == 512 - 6
    assert only(process(max_tokens=10_000)).sampling.max_tokens == 512 - 6
    assert only(process(max_tokens=7)).sampling.max_tokens == 7
    assert only(process(TokensPrompt([1] * 511))).sampling.max_tokens == 1


def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts() -> None:
    with pytest.raises(ContextLengthError, match=r"512.*513") as caught:
        process(TokensPrompt([1] * 513))
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (513, 512)
    with pytest.raises(ContextLengthError):
        process(TokensPrompt([1] * 512))


@pytest.mark.parametrize(("own", "can_grow"), [(8192, True), (512, False), (None, False)])
@pytest.mark.parametrize("prompt", [TokensPrompt([1] * 513), TextPrompt("x" * (EXACT_CHARS_MAX + 1))])
def test_a_longer_context_is_advised_only_where_the_model_has_one(
    prompt: Prompt, own: int | None, can_grow: bool
) -> None:
    source = FakeSource(config={} if own is None else {"max_position_embeddings": own})
    config = EngineConfig(model=ModelConfig(max_model_len=512))
    with pytest.raises(ContextLengthError) as caught:
        process(prompt, processor(source, config, num_kv_blocks=10**6))
    assert ("longer context (--max-model-len)" in str(caught.value)) is can_grow
    assert "shorten the prompt" in str(caught.value)


def test_a_window_cut_by_the_pool_is_named_as_such() -> None:
    source = FakeSource(config={"max_position_embeddings": 8192})
    small = processor(source, max_model_len=512, num_kv_blocks=32)
    with pytest.raises(CapacityExceededError) as caught:
        process(TokensPrompt([1] * 600), small)
    assert (caught.value.num_needed_tokens, caught.value.num_kv_tokens) == (601, 512)


def test_end_ids_are_the_models_and_the_callers() -> None:
    source = FakeSource(generation_config={"eos_token_id": [EOS, 258]})
    assert only(process(HELLO, processor(source))).end_token_ids == (EOS, 258)
    assert only(process(HELLO, processor(source), stop_token_ids=(7,))).end_token_ids == (EOS, 258, 7)
    assert only(process(HELLO, processor(source), ignore_eos=True, stop_token_ids=(7,))).end_token_ids == (7,)
    assert only(process()).end_token_ids == (EOS,)


def test_seeds_are_drawn_and_differ() -> None:
    drawn = {sequence.sampling.seed for sequence in process(n=8).sequences}
    assert len(drawn) == 8 and None not in drawn
    given = [sequence.sampling.seed for sequence in process(n=3, seed=-(2**63)).sequences]
    again = [sequence.sampling.seed for sequence in process(n=3, seed=-(2**63)).sequences]
    assert given == again and given[0] == -(2**63) and len(set(given)) == 3
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in given)


def test_each_of_n_has_its_own_id_and_the_first_scores_the_prompt() -> None:
    first, *others = process(n=3, prompt_logprobs=1).sequences
    assert len({sequence.request_id for sequence in (first, *others)}) == 3
    assert (first.match_limit, first.sampling.prompt_logprobs) == (0, 1)
    assert all((other.match_limit, other.sampling.prompt_logprobs) == (None, None) for other in others)


def test_defaults_come_from_generation_config() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True, "min_p": None, "eos_token_id": 2}
    assert default_sampling(FakeSource(generation_config=config)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert default_sampling(FakeSource()) == {}


@pytest.mark.parametrize("config", [{"top_p": 7}, {"top_k": -5}, {"temperature": float("nan")}, {"top_k": 1e99}])
def test_defaults_that_no_request_could_use_are_refused_at_start(config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {next(iter(config))}"):
        default_sampling(FakeSource(generation_config=config))


def test_a_scripted_reply_is_the_first_that_matches() -> None:
    scripted = processor(FakeSource(script=script(("weather", "rain"), ("", "what? <mark>"))))
    reply = only(process(TextPrompt("the weather"), scripted)).forced_token_ids
    assert reply is not None and unpack_ids(reply) == [*b"rain", EOS]
    other = only(process(TextPrompt("the time"), scripted)).forced_token_ids
    assert other is not None and unpack_ids(other) == [*b"what? <mark>", EOS]
    assert only(process()).forced_token_ids is None


def test_a_script_without_a_match_refuses() -> None:
    with pytest.raises(RequestError, match="scripted reply"):
        process(HELLO, processor(FakeSource(script=script(("weather", "rain")))))


def test_priority_has_bounds() -> None:
    assert only(processor().process(HELLO, SamplingParams(), request_id="r", priority=-5)).priority == -5
    with pytest.raises(InvalidRequestError) as caught:
        processor().process(HELLO, SamplingParams(), request_id="r", priority=PRIORITY_ABS_MAX + 1)
    assert caught.value.param == "priority"


def test_control_text_in_data_stays_text() -> None:
    """In every kind of data, also where the template writes JSON in ASCII; the assistant's own is left to the
    template."""
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<mark>{% endfor %}"
        "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}"
    )
    given = processor(FakeSource(chat_template=template))
    messages = [
        {"role": "user", "content": "a<mark>b"},
        {
            "role": "assistant",
            "content": "<mark>",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "<mark>"}'}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "<mark><eos>"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<mark>"}}]
    mark = 258
    ids = given.encode(ChatPrompt(messages, tools))
    expected = [
        BOS,
        *b"[user]a<mark>b",
        mark,
        *b"[assistant]",
        mark,
        *b'{"x": "<mark>"}',
        mark,
        *b"[tool]<mark><eos>",
        mark,
        *b"<mark>",
    ]
    assert ids == expected


def test_a_chat_without_control_text_is_encoded_as_it_always_was() -> None:
    given = processor()
    prompt = ChatPrompt([{"role": "user", "content": "a < b, <|x|>, é"}])
    assert given.encode(prompt) == byte_tokenizer().encode(given.render(prompt), add_special_tokens=False)
