"""Answers to prompts, from an engine and a tokenizer."""

import tiny

from burnish.loops.generate import generate
from burnish.types import SamplingParams


def test_answers_come_in_the_order_of_their_prompts():
    prompts = ["first", "second, which is longer"]
    params = SamplingParams(max_tokens=9)
    answers = generate(tiny.engine(text=True), tiny.tokenizer(), prompts, n=2, params=params)
    assert [(a.prompt, a.sample) for a in answers] == [(p, i) for p in prompts for i in range(2)]
    assert len({a.text for a in answers}) == 4
    for one in answers:
        assert len(one.token_ids) == len(one.logprobs) <= 9
        assert one.logprob == sum(one.logprobs)
        assert (str(one), one.finish in ("stop", "length")) == (one.text, True)
