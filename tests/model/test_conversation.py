"""Conversations: the parts, concatenated, are the tokens of the template's whole text."""

from datetime import datetime

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from burnish.calls import ToolCall, read_calls
from burnish.errors import ModelError
from burnish.model.conversation import ConversationFormat, default_call_format
from burnish.model.tokenizer import Tokenizer
from tests.model.texts import TEXTS

NOW = datetime(2026, 1, 1)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts of turns before the last user message are left out; results of tools share one block.
FORGETS = (
    "{% if tools is not none %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set parts = m.content.split('</think>') %}"
    "{% if loop.index0 > ns.last %}{{ m.content }}{% else %}{{ parts[-1].lstrip('\n') }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No token ends a message, and the date is part of the text.
BARE = (
    "{{ strftime_now('%Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPACED = CHATML.replace("{{ m.content }}<|im_end|>\n", "{{ m.content }} <|im_end|>")
# Only the last turn keeps its thought, whoever speaks after it.
LATEST = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = {"role": "user", "content": "two and two"}
FOUR = {"role": "assistant", "content": "four"}
TOOL = {"role": "tool", "content": "4"}


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


@pytest.fixture(scope="module")
def backend():
    """A tokenizer that merges bytes, so that a text's tokens depend on where it is cut."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [*TEXTS, "\n\n four four ??\n seven <result> assistant user tool"] * 2
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, vocab_size=400),
    )
    return made


def make(backend, template, ends=("<|im_end|>", "<|endoftext|>")):
    return Tokenizer(backend, tuple(map(backend.token_to_id, ends)), {}, template)


def whole(model, messages, tools=(), *, generate=True):
    text = model.chat(messages, now=NOW, tools=tools, generate=generate)
    return model.encode(text, add_special=False).tolist()


def joined(conversation, messages):
    """The ids of a conversation whose second message and every other one after it are turns."""
    parts = [conversation.open(messages[:1])]
    for number, message in enumerate(messages[1:]):
        if number % 2:
            parts.append(conversation.between(message if type(message) is list else [message]))
        else:
            parts.append(conversation.turn(message))
    return np.concatenate(parts).tolist()


@pytest.mark.parametrize("template", [CHATML, FORGETS, SPACED])
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_the_parts_are_the_whole(template, role, backend):
    model = make(backend, template)
    reply = {"role": role, "content": "and  three ?\n"}
    messages = [ASKED, FOUR, reply, {"role": "assistant", "content": "  seven\nis it"}, TOOL]
    conversation = ConversationFormat(model, now=NOW)
    assert joined(conversation, messages) == whole(model, messages)
    assert conversation.turn(FOUR)[-1] == conversation.end_id == model.end_ids[0]
    several = [ASKED, FOUR, [reply, ASKED, TOOL]]
    assert joined(conversation, several) == whole(model, [ASKED, FOUR, reply, ASKED, TOOL])


def test_the_end_token_is_the_one_that_the_template_writes(backend):
    model = make(backend, CHATML, ("<|endoftext|>", "<|im_end|>"))
    assert ConversationFormat(model, now=NOW).end_id == model.end_ids[1]


def test_results_of_one_step_share_a_block(backend):
    conversation = ConversationFormat(make(backend, FORGETS), now=NOW)
    model = make(backend, FORGETS)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}
    both = [ASKED, call, TOOL, {**TOOL, "content": "5"}]
    parts = [conversation.open(both[:1]), conversation.turn(call), conversation.between(both[2:])]
    assert np.concatenate(parts).tolist() == whole(model, both)
    alone = [conversation.between([message]).tolist() for message in both[2:]]
    assert alone[0] + alone[1] != conversation.between(both[2:]).tolist()


def test_arguments_of_calls_may_be_json_texts(backend):
    conversation = ConversationFormat(make(backend, FORGETS), now=NOW)
    turns = [
        conversation.turn({**FOUR, "tool_calls": [call]}).tolist()
        for call in (
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"function": {"name": "f", "arguments": {"a": 1}}},
            {"name": "f", "arguments": {"a": 1}},
        )
    ]
    assert turns[0] == turns[1] == turns[2]
    assert '{"a": 1}' in make(backend, FORGETS).decode(turns[0])


def test_tools_are_written_and_no_tools_are_none(backend):
    model, tool = make(backend, FORGETS), {"type": "function", "function": {"name": "f"}}
    assert ConversationFormat(model, [tool], now=NOW).open([ASKED]).tolist() == whole(
        model, [ASKED], [tool]
    )
    assert "[]" not in model.decode(ConversationFormat(model, [], now=NOW).open([ASKED]))
    for template in (FORGETS, CHATML, BARE, None):
        model = make(backend, template)
        empty, none = (ConversationFormat(model, tools, now=NOW) for tools in ([], None))
        assert empty.open([ASKED]).tolist() == none.open([ASKED]).tolist()
        assert empty.between([TOOL]).tolist() == none.between([TOOL]).tolist()


def test_which_roles_rewrite_earlier_turns(backend):
    assert ConversationFormat(make(backend, CHATML), now=NOW).rewrites(["user", "tool"]) == []
    assert ConversationFormat(make(backend, FORGETS), now=NOW).rewrites(["user", "tool"]) == [
        "user"
    ]


USER_MESSAGE = {"role": "user", "content": "and three ?"}
THOUGHT = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nfour"}


@pytest.mark.parametrize(
    ("template", "history", "message", "appends"),
    [
        (CHATML, [ASKED, THOUGHT], USER_MESSAGE, True),
        (FORGETS, [ASKED, THOUGHT], TOOL, True),
        (FORGETS, [ASKED, THOUGHT], USER_MESSAGE, False),
        (FORGETS, [ASKED, FOUR], USER_MESSAGE, True),  # there is no thought to leave out
        (FORGETS, [ASKED, THOUGHT, TOOL, FOUR], TOOL, True),
        (FORGETS, [ASKED, THOUGHT, TOOL, FOUR], USER_MESSAGE, False),
        (FORGETS, [ASKED, THOUGHT, USER_MESSAGE, FOUR], USER_MESSAGE, True),
        (SPACED, [ASKED, THOUGHT], USER_MESSAGE, True),
        (BARE, [ASKED, THOUGHT], USER_MESSAGE, True),
        (LATEST, [ASKED, THOUGHT], TOOL, True),
        (LATEST, [ASKED, THOUGHT, TOOL, THOUGHT], TOOL, False),
        (LATEST, [ASKED, FOUR, TOOL, FOUR], TOOL, True),
        (None, [ASKED, THOUGHT], USER_MESSAGE, True),
    ],
)
def test_when_a_conversation_is_only_continued(template, history, message, appends, backend):
    """Together with the message, the template writes what it wrote before, or something else. If
    it only continues, the parts are the template's text."""
    model = make(backend, template)
    conversation = ConversationFormat(model, now=NOW)
    assert conversation.appends(history, [message]) == appends
    if template in (CHATML, FORGETS, LATEST):
        context = conversation.open(history[:-1])
        parts = [context, conversation.turn(history[-1]), conversation.between([message])]
        text = model.decode(np.concatenate(parts))
        assert (text == model.decode(conversation.open([*history, message]))) == appends


def test_merges_across_the_end_of_a_turn(backend):
    """Tokens of a turn stay as sampled, also if the whole text would be tokenized otherwise: here
    the end token is no boundary, because the template writes none."""
    joins = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} four{% endif %}"
    )
    model = make(backend, joins)
    conversation = ConversationFormat(model, now=NOW)
    ids = model.encode(" fo", add_special=False)
    reply = {"role": "user", "content": "ur"}
    parts = [ids, conversation.between([reply])]
    joint = model.encode(" four four", add_special=False)
    assert model.decode(np.concatenate(parts)) == " four four"
    assert np.concatenate(parts).tolist() != joint.tolist()
    assert np.concatenate(parts).tolist()[: len(ids)] == ids.tolist()
    assert conversation.appends([ASKED, {"role": "assistant", "content": " fo"}], [reply])
    assert conversation.inserted_end.tolist() == []
    assert ConversationFormat(make(backend, CHATML), now=NOW).inserted_end.tolist() == [
        model.end_ids[0]
    ]


def test_rewriting_that_shows_only_in_a_longer_conversation(backend):
    assert ConversationFormat(make(backend, LATEST), now=NOW).rewrites(["tool"]) == ["tool"]
    assert ConversationFormat(make(backend, BARE), now=NOW).rewrites(["user", "tool"]) == []


def test_a_role_that_the_template_rejects_rewrites_nothing(backend):
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    strict += "{% endif %}{% endfor %}" + CHATML
    conversation = ConversationFormat(make(backend, strict), now=NOW)
    assert conversation.rewrites(["user", "tool"]) == []
    with pytest.raises(ModelError, match="no tools"):
        conversation.between([TOOL])


def test_a_template_without_end_tokens(backend):
    model = make(backend, BARE)
    conversation = ConversationFormat(model, now=NOW)
    parts = [conversation.open([ASKED]), conversation.turn(FOUR), conversation.between([TOOL])]
    end = model.decode(model.end_ids[:1])
    assert list(map(model.decode, parts)) == [
        "2026[user]two and two[assistant]",
        f"four{end}",
        "[tool]4[assistant]",
    ]


def test_a_model_without_a_template_has_plain_messages():
    model = Tokenizer.of_bytes()
    conversation = ConversationFormat(model, now=NOW)
    parts = [conversation.open([ASKED]), conversation.turn(FOUR), conversation.between([TOOL])]
    assert [model.decode(part) for part in parts] == ["two and two\n", "four<end>", "4\n"]
    assert conversation.rewrites(["user", "tool"]) == []


def test_models_that_have_no_conversations():
    backend = Tokenizer.of_bytes().backend
    with pytest.raises(ModelError, match="names no end token"):
        ConversationFormat(Tokenizer(backend, (), {}, CHATML), now=NOW)
    silent = (
        "{% for m in messages %}"
        "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ModelError, match="leaves out the assistant's messages"):
        ConversationFormat(Tokenizer(backend, (256,), {}, silent), now=NOW)
    other = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    with pytest.raises(ModelError, match="does not begin an assistant's message"):
        ConversationFormat(Tokenizer(backend, (256,), {}, other), now=NOW).turn(FOUR)


# The parts of the templates of Qwen 2.5 and Llama 3.1 that write tools.
QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}"
    "{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    "{% if loop.first and tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}\n\n"
    "{% endfor %}{% endif %}"
    "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MISTRAL = FORGETS.replace("<call>", "[CALL]")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLS = [
    {"function": {"name": "add", "arguments": {"a": 1, "b": [2.5, "</tool_call>;\n{", None]}}},
    {"function": {"name": "say", "arguments": {}}},
]


def test_the_format_of_calls_is_found_in_the_template(backend):
    templates = {"hermes": [QWEN, CHATML, BARE], "llama": [LLAMA], "plain": [None]}
    for name, several in templates.items():
        for template in several:
            assert default_call_format(make(backend, template), now=NOW) == name
    with pytest.raises(ModelError, match=r"can't read; set task\.tool_format = 'hermes'"):
        default_call_format(make(backend, MISTRAL), now=NOW)


@pytest.mark.parametrize("name", [None, "hermes", "llama", "plain"])
@pytest.mark.parametrize("template", [QWEN, LLAMA, CHATML, BARE, None])
@pytest.mark.parametrize("count", [1, 2])
def test_calls_are_read_as_they_were_written(name, template, count, backend):
    """Also by a template that writes no tools, or another format."""
    model = make(backend, template)
    used = name or default_call_format(model, now=NOW)
    count = 1 if (template, used) == (LLAMA, "llama") else count  # it writes one call
    conversation = ConversationFormat(model, [ADD], calls=name, now=NOW)
    message = {"role": "assistant", "content": "", "tool_calls": CALLS[:count]}
    text = model.decode(conversation.turn(message)[:-1])
    assert read_calls(text, used) == [ToolCall(**call["function"]) for call in CALLS[:count]]
    assert "Add two numbers." in model.decode(conversation.open([ASKED]))


@pytest.mark.parametrize("template", [QWEN, CHATML, BARE])
def test_parallel_results_share_a_block(template, backend):
    model = make(backend, template)
    conversation = ConversationFormat(model, [ADD], calls="hermes", now=NOW)
    text = model.decode(conversation.between([TOOL, {**TOOL, "content": "5"}]))
    block = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert block in text
    assert text.count("user") == 1


def test_a_template_without_tools_lists_them_in_the_first_message(backend):
    model = make(backend, CHATML)
    conversation = ConversationFormat(model, [ADD], now=NOW)
    alone = model.decode(conversation.open([ASKED]))
    assert alone.startswith("<|im_start|>system\n# Tools")
    assert "<tool_call>" in alone
    with_system = model.decode(conversation.open([{"role": "system", "content": "Hi"}, ASKED]))
    assert with_system.startswith("<|im_start|>system\nHi\n\n# Tools")
    no_system = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = make(backend, no_system)
    text = model.decode(ConversationFormat(model, [ADD], now=NOW).open([ASKED]))
    assert text.startswith("<|im_start|>user\n# Tools")
    assert text.endswith("two and two<|im_end|>\n<|im_start|>assistant\n")
    plain = Tokenizer.of_bytes()
    text = plain.decode(ConversationFormat(plain, [ADD], now=NOW).open([ASKED]))
    assert text == (
        'To call a tool, write a line: call NAME {ARGUMENTS}\nadd {"a": integer} Add two numbers.\n'
        "two and two\n"
    )


def test_tools_that_the_template_does_not_write_are_part_of_what_it_continues(backend):
    """The list of tools and their results, which become messages of other roles, are appended, too,
    so that no role rewrites earlier turns."""
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    conversation = ConversationFormat(make(backend, CHATML), tools, now=NOW)
    assert conversation.rewrites(["user", "tool"]) == []
    spoken = [ASKED, {"role": "assistant", "content": "<tool_call>{}</tool_call>"}]
    assert conversation.appends(spoken, [TOOL, TOOL])
    assert conversation.appends([*spoken, TOOL, TOOL, spoken[1]], [ASKED])
