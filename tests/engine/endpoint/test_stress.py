"""200 clients at once, with OpenAI's own package: none hangs, and none gets another's tokens."""

import asyncio
import random

import pytest
import tiny

from burnish.engine.native.engine import NativeEngine
from burnish.engine.settings import EngineSettings
from tests.engine.endpoint.test_app import until
from tests.served import serving

openai = pytest.importorskip("openai", reason="openai is not installed")

TOKENIZER = tiny.tokenizer()
WRONG = [{"messages": []}, {"tool_choice": "required"}, {"model": "x"}, {"stop": [""]}, {"a": 1}]


def make_engine():
    model = tiny.model(context=2048)
    return NativeEngine(model, TOKENIZER, EngineSettings(kv_bytes=1 << 26, page_size=4))


def body_of(number):
    """A request whose answer no other request has, and whose prompt names it."""
    messages = [{"role": "user", "content": f"{number}"}]
    most = 8 + number % 40
    return {"model": "m", "messages": messages, "seed": number, "max_tokens": most, "n": 1}


async def ask(own, number, *, streams):
    """The text and the tokens of an answer, whose number of tokens is that of its usage."""
    body = body_of(number) | {"logprobs": True}
    if not streams:
        found = await own.chat.completions.create(**body)
        (choice,) = found.choices
        text, listed = choice.message.content, choice.logprobs.content
        used = found.usage
    else:
        text, listed, used = "", [], None
        options = {"include_usage": True}
        async for chunk in await own.chat.completions.create(
            **body, stream=True, stream_options=options
        ):
            used = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                listed += choice.logprobs.content if choice.logprobs else []
    assert len(listed) == used.completion_tokens
    assert used.prompt_tokens == len(f"{number}\n")
    return text, [one.token for one in listed], [one.logprob for one in listed]


async def aborted(own, number):
    """A stream that is closed early, or a request that is cancelled."""
    body = body_of(number) | {"max_tokens": 1900, "n": 2}
    if number % 2:
        found = await own.chat.completions.create(**body, stream=True)
        async for _ in found:
            break
        await found.close()
    else:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                await own.chat.completions.create(**body)


async def malformed(port, own, number):
    if number % 2:
        with pytest.raises(openai.APIStatusError) as raised:
            await own.chat.completions.create(
                **(body_of(number) | {"extra_body": WRONG[number // 2 % 5]})
            )
        assert raised.value.status_code in (400, 404)
        return
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [
        b"POST /v1/completions HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
        b"\x16\x03\x01 not http at all\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        b'Content-Type: application/json\r\n\r\n{"a": 1',
    ]
    writer.write(lines[number // 2 % 3])
    await writer.drain()
    if number // 2 % 3 < 2:
        await asyncio.wait_for(reader.read(), 60)
    writer.close()


async def run_clients(served, count, rounds):
    """Ask from ``count`` clients at once; return the answers by their numbers."""
    draw, found = random.Random(0), {}

    async def run(place):
        given = {"base_url": served.url, "api_key": "x", "max_retries": 10, "timeout": 300}
        async with openai.AsyncOpenAI(**given) as own:
            for turn in range(rounds):
                number = place * rounds + turn
                kind = draw.choice(["whole", "stream", "stream", "abort", "malformed"])
                if kind == "abort":
                    await aborted(own, number)
                elif kind == "malformed":
                    await malformed(served.port, own, number)
                else:
                    found[number] = await ask(own, number, streams=kind == "stream")

    async with asyncio.timeout(900):
        await asyncio.gather(*map(run, range(count)))
    return found


@pytest.mark.parametrize(
    ("count", "rounds", "capacity"),
    [(12, 2, 16), pytest.param(200, 3, 150, marks=pytest.mark.slow)],
)
def test_clients_at_once(count, rounds, capacity):
    """With less capacity than clients, requests are refused (429), and the client's package tries
    them again. Every answer is the one that its request gets alone."""
    with serving(make_engine(), TOKENIZER, context=2048, capacity=capacity) as served:
        found = asyncio.run(run_clients(served, count, rounds))
        until(lambda: served.thread.unfinished == 0)
        assert len(found) > count * rounds / 3

        async def alone():
            async with openai.AsyncOpenAI(base_url=served.url, api_key="x") as own:
                return {number: await ask(own, number, streams=False) for number in found}

        for number, (text, tokens, logprobs) in asyncio.run(alone()).items():
            assert found[number][:2] == (text, tokens)
            assert found[number][2] == pytest.approx(logprobs, abs=2 * tiny.CLOSE)
        assert not served.failed
