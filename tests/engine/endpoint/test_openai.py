"""The endpoint as OpenAI's own client sees it."""

import asyncio
import json

import pytest
import tiny

from burnish.calls import CALL_FORMATS, ToolCall
from burnish.engine.native.engine import NativeEngine
from burnish.engine.settings import EngineSettings
from tests.engine.endpoint.scripted import HERMES, Script
from tests.served import serving

openai = pytest.importorskip("openai", reason="openai is not installed")
httpx = pytest.importorskip("httpx")

TOKENIZER = tiny.tokenizer()
USER = {"role": "user", "content": "Hi"}
ASKED = {"model": "m", "messages": [USER], "max_tokens": 24}
TEXT = {"model": "m", "prompt": "Hi", "max_tokens": 24}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def make_engine():
    model = tiny.model(context=4096)
    return NativeEngine(model, TOKENIZER, EngineSettings(kv_bytes=1 << 24, page_size=4))


@pytest.fixture(scope="module")
def served():
    with serving(make_engine(), TOKENIZER, context=4096) as found:
        yield found


@pytest.fixture(scope="module")
def scripted():
    """A server whose model says the attribute ``text`` of its engine."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HERMES
    engine = Script(tokenizer)
    with serving(engine, tokenizer, context=4096) as found:
        yield found, engine


TRUSTED = httpx.create_ssl_context()
"""Made once, because it takes longer than most requests."""


def client(served, **how):
    given = {"base_url": served.url, "api_key": "none", "max_retries": 0, "timeout": 60} | how
    return openai.OpenAI(**given, http_client=openai.DefaultHttpxClient(verify=TRUSTED))


def ask(served, **body):
    with client(served) as own:
        return own.chat.completions.create(**(ASKED | body))


def stream(served, **body):
    """The chunks of a streamed answer."""
    with client(served) as own, own.chat.completions.create(**(ASKED | body), stream=True) as found:
        return list(found)


def joined(chunks):
    """The choices of a stream as those of a whole answer: content, calls, logprobs and finish."""
    choices = {}
    for chunk in chunks:
        for part in chunk.choices:
            own = choices.setdefault(part.index, {"content": "", "calls": {}, "logprobs": []})
            own["content"] += part.delta.content or ""
            for call in part.delta.tool_calls or ():
                assert call.index not in own["calls"]
                own["calls"][call.index] = call.model_dump(exclude={"index"})
            own["logprobs"] += [] if part.logprobs is None else part.logprobs.content
            assert "finish" not in own
            if part.finish_reason:
                own["finish"] = part.finish_reason
    return [choices[index] for index in sorted(choices)]


def whole(answer):
    found = []
    for choice in answer.choices:
        calls = [call.model_dump() for call in choice.message.tool_calls or ()]
        found.append(
            {
                "content": choice.message.content or "",
                "calls": dict(enumerate(calls)),
                "logprobs": [] if choice.logprobs is None else choice.logprobs.content,
                "finish": choice.finish_reason,
            }
        )
    return found


@pytest.mark.parametrize("body", [{}, {"n": 3}, {"logprobs": True, "n": 2}, {"temperature": 0}])
def test_a_stream_has_the_answer_token_for_token(served, body):
    for seed in range(3):
        answer = ask(served, seed=seed, **body)
        chunks = stream(served, seed=seed, stream_options={"include_usage": True}, **body)
        assert joined(chunks) == whole(answer)
        assert chunks[-1].usage == answer.usage
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert {chunk.id for chunk in chunks} != {answer.id}  # its body has other fields
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_stream_has_the_texts_of_completions(served):
    body = TEXT | {"prompt": ["Hi", "you"], "n": 2, "logprobs": 0}
    with client(served) as own:
        answer = own.completions.create(**body)
        chunks = list(own.completions.create(**body, stream=True))
    texts, tokens, ends = [""] * 4, [[], [], [], []], [None] * 4
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
        ends[choice.index] = ends[choice.index] or choice.finish_reason
    assert texts == [choice.text for choice in answer.choices]
    assert tokens == [choice.logprobs.token_logprobs for choice in answer.choices]
    assert ends == [choice.finish_reason for choice in answer.choices]
    assert sum(map(len, tokens)) == answer.usage.completion_tokens


def test_logprobs_are_those_of_the_sampled_tokens(served):
    answer = ask(served, logprobs=True, seed=5)
    found = answer.choices[0].logprobs.content
    assert len(found) == answer.usage.completion_tokens
    prompt = TOKENIZER.encode("Hi\n")
    vocabulary = {TOKENIZER.decode([i]): i for i in range(tiny.VOCAB)}
    ids = [vocabulary[one.token] for one in found if "\ufffd" not in one.token]
    assert b"".join(bytes(one.bytes) for one in found if one.bytes is not None)
    if len(ids) == len(found):  # otherwise tokens are parts of characters
        expected = tiny.learner_logprobs(tiny.model(context=4096), prompt, ids, 1.0)
        assert [one.logprob for one in found] == pytest.approx(expected, abs=2 * tiny.CLOSE)
    assert ask(served, seed=5).choices[0].logprobs is None


def test_stop_strings_never_appear_in_a_stream(served):
    text = ask(served, max_tokens=60).choices[0].message.content
    for start in range(0, 30, 7):
        stop = text[start + 3 : start + 6]
        answer = ask(served, max_tokens=60, stop=[stop, "never"])
        chunks = stream(served, max_tokens=60, stop=[stop, "never"])
        assert joined(chunks) == whole(answer)
        assert answer.choices[0].message.content == text[: text.index(stop)]


def test_the_model_list_has_the_context(served):
    with client(served) as own:
        (model,) = own.models.list().data
    assert (model.id, model.max_model_len) == ("m", 4096)


def test_both_names_of_the_limit(served):
    same = [ask(served, max_tokens=5), ask(served, max_tokens=None, max_completion_tokens=5)]
    assert same[0].choices == same[1].choices
    assert same[0].choices[0].finish_reason == "length"
    assert same[0].usage.completion_tokens == 5


def test_a_long_prompt_has_its_own_error_code(served):
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            ask(served, messages=[{"role": "user", "content": "x" * 5000}], stream=streams)
        assert raised.value.code == "context_length_exceeded"
        assert (raised.value.param, raised.value.type) == ("messages", "invalid_request_error")
    with client(served) as own, pytest.raises(openai.BadRequestError) as raised:
        own.completions.create(model="m", prompt="x" * 5000)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")


def test_another_model_is_not_found(served):
    with pytest.raises(openai.NotFoundError) as raised:
        ask(served, model="other")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
REFUSALS = [
    ({"tool_choice": "required"}, "tool_choice", 'must be "auto" or "none"'),
    ({"tool_choice": {"type": "function"}}, "tool_choice", 'must be "auto" or "none"'),
    ({"response_format": {"type": "json_object"}}, "response_format", 'must be {"type": "text"}'),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs", "top_logprobs must be 0"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "must be true"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream = true"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported field"),
    ({"tools": [ADD, ADD]}, "tools", "different names"),
    ({"tools": [{"type": "web"}]}, "tools.0.type", "must be 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", ""),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages.0.role", "'tool'"),
    ({"messages": [{"role": "user"}]}, "messages.0", "the content is missing"),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages.0", "only the role 'assistant'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "has a tool_call_id"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
        None,
        "messages.0.tool_call_id must be the id of a call in an earlier message",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [CALL | {"function": {"name": "add", "arguments": "[1]"}}],
                }
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
        "must be the text of a JSON object",
    ),
    ({"messages": [USER | {"audio": {"id": "x"}}]}, "messages.0.audio", "unsupported field"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSALS)
def test_what_is_not_supported_is_refused(served, body, param, message):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(served, **body)
    assert message in raised.value.message
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


def test_fields_that_mean_nothing_are_accepted(served):
    empty = {"response_format": {"type": "text"}, "top_logprobs": 0, "parallel_tool_calls": True}
    plain = ask(served)
    assert ask(served, tool_choice="auto", **empty).choices == plain.choices
    # Clients send an answer back with all fields of its type.
    back = plain.choices[0].message.model_dump()
    assert set(back) > {"refusal", "audio", "function_call", "tool_calls"}
    ask(served, messages=[USER, back, USER])
    ask(served, messages=[USER, plain.choices[0].message, USER])


def calls_text(*calls):
    return CALL_FORMATS["hermes"].write([ToolCall("add", {"a": a}) for a in calls])


def nested(levels):
    """The text of a JSON object with this number of levels."""
    return '{"a":' * levels + "1" + "}" * levels


WRONG_ARGUMENTS = {
    r'{"a": "\ud800"}': "half of a surrogate pair",
    r'{"\udc00": 1}': "half of a surrogate pair",
    nested(101): "more than 100 levels",
    nested(900): "more than 100 levels",
    nested(50_000): "nested too deeply",
    '{"a": NaN}': "NaN is no JSON number",
    '{"a": 1e999}': "1e999 is no finite number",
    "[1]": "it is another value",
}
"""Arguments of calls that are refused, and the reasons."""


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS)
def test_arguments_that_no_template_can_write_are_refused(served, scripted, arguments):
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for server in (served, scripted[0]):
        for tools in ([], [ADD]):
            with pytest.raises(openai.BadRequestError) as raised:
                ask(server, messages=messages, tools=tools)
            assert WRONG_ARGUMENTS[arguments] in raised.value.message
            assert "must be the text of a JSON object" in raised.value.message
            assert raised.value.param == "messages.1.tool_calls.0.function.arguments"


def test_arguments_of_many_levels_are_written(served, scripted):
    call = CALL | {"function": {"name": "add", "arguments": nested(100)}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for server in (served, scripted[0]):
        for tools in ([], [ADD]):
            assert ask(server, messages=messages, tools=tools).choices


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "?"}]},
        {"messages": [USER | {"name": "?"}]},
        {"stop": ["?"]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "?"}}]},
        {"messages": [USER], "user": "?"},
        {"model": "?"},
    ],
)
def test_requests_with_lone_surrogates_are_refused(served, body):
    """OpenAI's client can't send them."""
    text = json.dumps(ASKED | body)
    for half in (r"\ud800", r"\udfffx", r"\ud800\ud800"):
        for streams in ("false", "true"):
            sent = text.replace("?", half).replace('"max_', f'"stream": {streams}, "max_')
            status, found = served.ask(sent.encode(), "/v1/chat/completions")
            assert (status, found["error"]["type"]) == (400, "invalid_request_error")
            assert "Invalid JSON" in found["error"]["message"]


@pytest.mark.parametrize("levels", [190, 1000, 100_000])
def test_requests_that_nest_deeply_are_answered_or_refused(served, scripted, levels):
    tool = {"type": "function", "function": {"name": "f", "parameters": "?"}}
    text = json.dumps(ASKED | {"tools": [tool]}).replace('"?"', nested(levels))
    for server in (served, scripted[0]):
        status, found = server.ask(text.encode(), "/v1/chat/completions")
        assert status == (200 if levels < 200 else 400)
        assert levels < 200 or "recursion limit" in found["error"]["message"]


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS)
def test_sampled_calls_that_cannot_be_sent_are_text(scripted, arguments):
    served, engine = scripted
    if len(arguments) > 10_000:
        arguments = nested(2000)
    engine.text, engine.at_once = f'<tool_call>{{"name": "add", "arguments": {arguments}}}', 1000
    engine.text += "</tool_call>"
    how = {"tools": [ADD], "max_tokens": 100_000}
    (choice,) = ask(served, **how).choices
    assert (choice.message.content, choice.message.tool_calls) == (engine.text, None)
    (own,) = joined(stream(served, **how))
    assert (own["content"], own["calls"]) == (engine.text, {})


TEMPLATES = [
    ("{{ raise_exception('only users may speak') }}", "rejected these messages: only users may"),
    ("{{ messages[0].nothing.more }}", "rejected these messages: 'dict object' has no attribute"),
    ("{{ messages[0].nothing | tojson }}", "can't write these messages: TypeError: Object of type"),
    ("{{ 1 / 0 }}", "can't write these messages: ZeroDivisionError: division by zero"),
    ("{{ messages[0].content + 1 }}", "can't write these messages: TypeError: can only conc"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "can't write these messages: Recursion"),
    ("{% for %}", "rejected these messages: Expected an expression, got 'end of"),
    ("{{ messages[0].__class__.__mro__[1] }}", "rejected these messages: access to attribute"),
]


@pytest.mark.parametrize(("template", "said"), TEMPLATES)
def test_a_template_that_fails_is_explained(template, said):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    with serving(Script(tokenizer), tokenizer) as served:
        for body in ({}, {"tools": [ADD]}, {"messages": [USER, call]}):
            for ask_one in (ask, stream):
                with pytest.raises(openai.BadRequestError) as raised:
                    ask_one(served, **body)
                assert f"the chat template {said}" in raised.value.body["message"]
        assert served.ask(TEXT)[0] == 200


ODD_SCHEMAS = [
    {"properties": {"a": True}},
    {"properties": {"a": {"type": ["string", 5]}}},
    {"properties": {"a": {"enum": 3}}},
    {"properties": {"a": {"type": {"x": 1}}}},
    {"properties": ["a"]},
    {"properties": None},
]


@pytest.mark.parametrize("parameters", ODD_SCHEMAS)
def test_schemas_of_any_form_are_explained(served, scripted, parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for server in (served, scripted[0]):
        assert ask(server, tools=[tool]).choices


ANSWERS = [
    ("Hello.", "Hello.", []),
    (f"Let me see.\n\n{calls_text(1)}", "Let me see.", [1]),
    (calls_text(1, 2), "", [1, 2]),
    (f"<think>\n{calls_text(7)}\n</think>\n\nI add.\n{calls_text(3)}", None, [3]),
    (f"I add. {calls_text(1)[:-5]}", None, []),
    ("1 <tool", "1 <tool", []),
    ("a é <tool_cal é ü </b>  ", None, []),
]


@pytest.mark.parametrize(("text", "content", "calls"), ANSWERS)
def test_tool_calls_are_read_and_never_shown(scripted, text, content, calls):
    served, engine = scripted
    engine.text = text
    if content is None:
        content = text.rpartition("\n<tool_call>")[0] if calls else text
    answer = ask(served, tools=[ADD], max_tokens=4000)
    (choice,) = answer.choices
    assert (choice.message.content or "") == content
    found = [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()]
    assert found == [{"a": a} for a in calls]
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    for at_once in (1, 2, 5, 1000):
        engine.at_once = at_once
        chunks = stream(served, tools=[ADD], max_tokens=4000)
        (own,) = joined(chunks)
        assert {call["function"]["name"] for call in own["calls"].values()} <= {"add"}
        expected = whole(answer)[0]
        for mine, theirs in zip(own["calls"].values(), expected["calls"].values(), strict=True):
            assert mine["function"] == theirs["function"]
            assert mine["type"] == theirs["type"] == "function"
        assert own | {"calls": {}} == expected | {"calls": {}}
        ids = [call["id"] for call in own["calls"].values()]
        assert len({*ids}) == len(ids)


def test_a_stream_comes_as_it_is_sampled(scripted):
    served, engine = scripted
    engine.text, engine.at_once = "abcdefgh", 2
    contents = [chunk.choices[0].delta.content for chunk in stream(served)]
    assert contents == ["ab", "cd", "ef", "gh", None]


def test_without_tools_or_with_none_calls_are_text(scripted):
    served, engine = scripted
    engine.text = calls_text(1)
    for body in ({}, {"tools": [ADD], "tool_choice": "none"}):
        (choice,) = ask(served, **body, max_tokens=1000).choices
        assert (choice.message.content, choice.message.tool_calls) == (engine.text, None)
        assert choice.finish_reason == "stop"
    for choice in ("auto", "none"):
        ask(served, tools=[ADD], tool_choice=choice)
    one, other = engine.requests[-2:]
    assert one.prompt.tolist() == other.prompt.tolist()
    assert '"add"' in TOKENIZER.decode(one.prompt)


def test_a_conversation_with_tools_is_written_by_the_template(scripted):
    served, engine = scripted
    engine.text = calls_text(1, 2)
    answer = ask(served, tools=[ADD], max_tokens=1000).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": str(index), "name": "add"}
        for index, call in enumerate(answer.tool_calls)
    ]
    ask(served, tools=[ADD], messages=[USER, answer, *results])
    text = TOKENIZER.decode(engine.requests[-1].prompt)
    said = "".join(
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2)
    )
    told = "<|a|>tool\n0<|end|><|a|>tool\n1<|end|><|a|>assistant\n"
    assert text.endswith(f"<|a|>user\nHi<|end|><|a|>assistant\n{said}<|end|>{told}")


def test_without_a_template_tools_are_explained(served):
    """The history of calls is written in the plain format, also without the tools."""
    calls = [CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}}]
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    with_tools = ask(served, messages=history, tools=[ADD]).usage.prompt_tokens
    text = 'Hi\ncall add {"a": 1}\n5\n'
    assert ask(served, messages=history).usage.prompt_tokens == len(text)
    listed = CALL_FORMATS["plain"].explain([ADD])
    assert with_tools == len(f"{listed}\n{text}")


def test_a_key_is_required_if_there_is_one():
    with serving(make_engine(), TOKENIZER, key="secret", context=4096) as served:
        for wrong in ("none", "secre", "secrets"):
            with client(served, api_key=wrong) as own, pytest.raises(openai.AuthenticationError):
                own.models.list()
        with client(served, api_key="secret") as own:
            assert own.chat.completions.create(**ASKED).choices
        status, found = served.ask(TEXT)
        assert (status, found["error"]["code"]) == (401, "invalid_api_key")


def test_a_session_is_a_part_of_the_path(served):
    plain = ask(served)
    for url in ("/session/a/v1", "/session/a%20b/v1"):
        with client(served, base_url=served.url.removesuffix("/v1") + url) as own:
            assert own.chat.completions.create(**ASKED).choices == plain.choices
            assert own.models.list().data
    error = pytest.raises(openai.BadRequestError, match="at most 200 characters, got 201")
    with client(served, default_headers={"X-Session-ID": "x" * 201}) as own, error:
        own.chat.completions.create(**ASKED)


def test_a_stream_that_is_closed_aborts_its_request(served):
    async def run():
        given = {"base_url": served.url, "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**given) as own:
            found = await own.chat.completions.create(
                **(ASKED | {"max_tokens": 4000, "n": 2}), stream=True
            )
            async for _ in found:
                break
            assert served.thread.unfinished == 2
            await found.close()
            for _ in range(1000):
                if not served.thread.unfinished:
                    return
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert served.thread.unfinished == 0


def test_an_engine_that_fails_ends_a_stream_with_an_error():
    engine = make_engine()
    with serving(engine, TOKENIZER, context=4096) as served, client(served) as own:
        found = own.chat.completions.create(**(ASKED | {"max_tokens": 4000}), stream=True)
        next(iter(found))
        engine.step = lambda: 1 / 0
        with pytest.raises(openai.APIError, match="the engine failed: ZeroDivisionError"):
            list(found)
        served.ended.join(10)
    assert served.failed
