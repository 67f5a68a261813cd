"""A conversation in the terminal: its messages, its pieces, and what is typed."""

import pytest
from typer.testing import CliRunner

from burnish.cli import chat
from burnish.cli.main import app
from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.randomness import Stream
from burnish.rollout.rollout import complete
from burnish.types import SamplingParams

PARAMS = SamplingParams(max_tokens=12, seed=5)


def opened(context=200, template=None):
    """An engine with a random model whose tokens are bytes, and its tokenizer."""
    tokenizer = Tokenizer.of_bytes()
    tokenizer.chat_template = template
    shape = {"n_layers": 1, "d_model": 32, "n_heads": 4, "d_ff": 48, "context": context}
    model = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, **shape)).init_weights(0)
    return NativeEngine(model, tokenizer, EngineSettings(kv_bytes=1 << 22)), tokenizer


def expected(text, turn, params=PARAMS):
    """The answer to a prompt in a turn, sampled without a conversation."""
    engine, tokenizer = opened()
    ids = tokenizer.encode(text, add_special=False)
    request = Request("r", ids, params=params, group=turn, stream=Stream.GENERATE)
    return complete(engine, [request])[0][0].text


def said(conversation, text):
    return "".join(conversation.answer(text))


def test_a_turn_continues_all_messages_before_it():
    conversation = chat.Conversation(*opened(), PARAMS, "S")
    first = said(conversation, "a")
    assert first == expected("S\na\n", 0)
    assert said(conversation, "b") == expected(f"S\na\n{first}\nb\n", 1)
    conversation.reset()
    assert said(conversation, "b") == expected("S\nb\n", 2)


def test_a_chat_template_is_used():
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    conversation = chat.Conversation(*opened(template=template), PARAMS, "S")
    assert said(conversation, "a") == expected("<system>S<user>a<answer>", 0)


def test_an_answer_arrives_in_pieces():
    conversation = chat.Conversation(*opened(), PARAMS)
    pieces = [piece for piece in conversation.answer("a") if piece]
    assert len(pieces) > 1
    assert "".join(pieces) == conversation.messages[-1]["content"]


def test_characters_of_several_tokens_stay_whole():
    """Bytes that are not complete yet would appear as replacement characters."""
    engine, tokenizer = opened()
    tokens = tokenizer.encode("aä€b", add_special=False).tolist()
    grown = [tokens[:n] for n in range(1, len(tokens) + 1)]
    engine.response_of = lambda name: grown.pop(0) if grown else []
    conversation = chat.Conversation(engine, tokenizer, SamplingParams(max_tokens=len(tokens)))
    pieces = [piece for piece in conversation.answer("x") if piece]
    assert pieces[:4] == ["a", "ä", "€", "b"]


def test_a_conversation_that_is_too_long_forgets_the_message():
    conversation = chat.Conversation(*opened(), PARAMS)
    said(conversation, "a")
    before = conversation.messages
    with pytest.raises(EngineError, match="1 to 199 tokens"):
        said(conversation, "x" * 300)
    assert conversation.messages == before
    assert said(conversation, "b")


def run(monkeypatch, typed, *options):
    monkeypatch.setattr(chat, "open_named_model", lambda model: opened())
    result = CliRunner().invoke(app, ["chat", "m", "--max-tokens", "12", *options], input=typed)
    assert result.exit_code == 0, result.output
    return result


def test_lines_of_a_pipe_are_messages(monkeypatch):
    result = run(monkeypatch, "a\n\n/reset\n/quit now\n a\n", "--seed", "5")
    answers = expected("a\n", 0), expected(" a\n", 1)
    assert result.stdout == "\n".join(f"{chat.printable(answer)}\n" for answer in answers)
    assert "there is no command '/quit', only /reset" in result.stderr
    assert "cut at its limit of tokens" in result.stderr


def test_control_characters_are_escaped(monkeypatch):
    monkeypatch.setattr(chat.Conversation, "answer", lambda self, line: iter(["\x1b[2J", "a\rb"]))
    result = run(monkeypatch, b"hello \xff\n")
    assert result.stdout == "\\x1b[2Ja\\rb\n"


def test_a_message_that_is_too_long_does_not_end_the_conversation(monkeypatch):
    result = run(monkeypatch, f"{'x' * 300}\na\n", "--temperature", "0")
    greedy = SamplingParams(0, max_tokens=12)
    # The first answer is empty, and a blank line separates it from the second.
    assert result.stdout == f"\n\n{chat.printable(expected('a' + chr(10), 1, greedy))}\n"
    assert "shorten the message, or enter /reset" in result.stderr


def test_ctrl_c_ends(monkeypatch):
    def interrupted(self, line):
        yield "a"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.Conversation, "answer", interrupted)
    assert run(monkeypatch, "hello\nhello\n").stdout == "a\n"
