"""Episodes: every sampled token is sampled in its recorded context, and each limit ends one."""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from burnish.console.progress import begin, showing
from burnish.engine.native import sampler
from burnish.engine.protocol import Request
from burnish.environments.protocol import Observation
from burnish.errors import EngineError
from burnish.model.conversation import ConversationFormat
from burnish.rollout.episodes import CUT, EpisodeEngine, EpisodeLimits
from burnish.rollout.rollout import complete, describe
from burnish.types import (
    Episode,
    Finish,
    Grade,
    Group,
    Limit,
    Prompt,
    SamplingParams,
    SequenceStart,
)
from tests.engine import tiny

START = ({"role": "user", "content": "go"},)
TEMPLATE = (
    "{% for m in messages %}<|a|>{{ m.role[0] }}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>a{% endif %}"
)


class Scripted:
    """Environments that answer "ok" and end an episode after ``last`` turns."""

    def __init__(
        self,
        last=3,
        answer="ok",
        fails=(),
        starts=START,
        seconds=0.0,
        roles="t",
        deterministic=True,
    ):
        self.last, self.answer, self.fails, self.starts = last, answer, fails, starts
        self.seconds, self.roles, self.deterministic = seconds, roles, deterministic
        self.live, self.heard, self.calls = {}, {}, []

    def reset(self, episodes, replayed):
        assert not replayed
        self.calls.append(("reset", [name for name, *_ in episodes]))
        found = []
        for name, row, seed in episodes:
            assert (row, seed) == ({"n": 1}, 5)
            assert name not in self.live
            self.live[name], self.heard[name] = 0, []
            error = "reset: no" if ("reset", name) in self.fails else None
            starts = self.starts(name) if callable(self.starts) else self.starts
            messages = [] if error else list(starts)
            found.append(Observation(messages, None, False, {}, error, self.seconds))
        return found

    def step(self, actions):
        self.calls.append(("step", [name for name, _ in actions]))
        return [self._step(name, message) for name, message in actions]

    def _step(self, name, message):
        assert message["role"] == "assistant"
        self.heard[name].append(message["content"])
        self.live[name] += 1
        if ("step", name) in self.fails:
            return Observation([], None, False, {}, "step: no")
        done = self.live[name] >= self.last
        role = {"t": "tool", "u": "user"}[self.roles[(self.live[name] - 1) % len(self.roles)]]
        messages = [{"role": role, "content": self.answer}]
        heard = {"heard": float(len(self.heard[name]))}
        return Observation(messages, 0.5 * done, done, heard, None, self.seconds)

    def end(self, names, *, waits=True):
        for name in names:
            self.live.pop(name, None)

    @property
    def began(self):
        return [names for call, names in self.calls if call == "reset"]


class Slow(Scripted):
    """Environments that answer after as many polls as ``delay`` says for their name."""

    def __init__(self, delay=lambda name: 0, **script):
        super().__init__(**script)
        self.delay, self.left, self.answers = delay, {}, {}

    def begin_reset(self, episodes, replayed):
        self._expect([name for name, *_ in episodes], self.reset(episodes, replayed))

    def begin_step(self, actions):
        self._expect([name for name, _ in actions], self.step(actions))

    def _expect(self, names, observations):
        for name, observation in zip(names, observations, strict=True):
            assert name not in self.left
            self.left[name], self.answers[name] = self.delay(name), observation

    def poll(self, seconds):
        ready = [name for name, left in self.left.items() if left <= 0]
        if not ready and seconds and self.left:  # it waits for the first one
            ready = [min(self.left, key=self.left.get)]
        self.left = {name: left - 1 for name, left in self.left.items() if name not in ready}
        return {name: self.answers.pop(name) for name in ready}

    def end(self, names, *, waits=False):
        assert not waits
        super().end(names)
        for name in names:
            self.left.pop(name, None)
            self.answers.pop(name, None)


def wrapped(environments, *, engine=None, chat=TEMPLATE, pace="lockstep", follows=False, **limits):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = chat
    conversation = ConversationFormat(tokenizer, now=datetime(2026, 1, 1))
    limits = EpisodeLimits(**{"context": 96, **limits})
    engine = engine or tiny.engine(text=True, own=tiny.model(context=limits.context))
    made = EpisodeEngine(
        engine, environments, tokenizer, conversation, limits, pace, follows=follows
    )
    return made, conversation


def asked(conversation, name="r", n=3, group=0, **params):
    params = SamplingParams(**{"max_tokens": 60, **params})
    ids = conversation.open(START)
    return Request(name, ids, n, params, group, episode=Episode({"n": 1}, 5, START))


def group_of(completions):
    prompt = Prompt("p", "", np.zeros(1, np.int32), "t")
    return Group(0, prompt, completions, (Grade(0.0),) * len(completions))


def play(environments, requests=(("r", 3, 0),), params=None, **limits):
    engine, conversation = wrapped(environments, **limits)
    own = [asked(conversation, name, n, group, **(params or {})) for name, n, group in requests]
    found = complete(engine, own)
    assert engine.unfinished == 0
    assert environments.live == {}
    return found, conversation


def test_each_token_is_sampled_in_its_recorded_context():
    model = tiny.model()
    environments = Scripted(last=4)
    found, conversation = play(
        environments, [("a", 3, 0), ("b", 2, 1)], {"temperature": 0.7}, turn_tokens=6
    )
    inserted = conversation.between([{"role": "tool", "content": "ok"}])
    for request, group in zip(("a", "b"), found, strict=True):
        for i, completion in enumerate(group):
            assert (completion.request_id, completion.sample_index) == (request, i)
            assert (completion.finish, len(completion.turns)) == (Finish.STOP, 4)
            expected = tiny.learner_logprobs(
                model, conversation.open(START), completion.token_ids, 0.7
            )
            own = completion.sampled
            np.testing.assert_allclose(completion.logprobs[own], expected[own], atol=tiny.CLOSE)
            before = 0
            for turn, heard in zip(
                completion.turns, environments.heard[f"{request}/{i}"], strict=True
            ):
                assert own[turn.start : turn.end].all()
                assert not own[before : turn.start].any()
                if before:
                    gap = completion.token_ids[before : turn.start]
                    ended = completion.token_ids[before - 1] == tiny.END
                    assert gap.tolist() == [*([] if ended else [tiny.END]), *inserted]
                assert turn.text == heard
                assert 1 <= turn.end - turn.start <= 6
                before = turn.end
            assert before == len(completion.token_ids)
            assert [turn.reward for turn in completion.turns] == [0, 0, 0, 0.5]
            assert completion.turns[-1].metrics == {"heard": 4.0}


def test_episodes_repeat_and_do_not_share_draws():
    first, _ = play(Scripted(), [("a", 4, 7)], turn_tokens=8)
    again, _ = play(Scripted(), [("a", 4, 7)], turn_tokens=8)
    for a, b in zip(first[0], again[0], strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()
    texts = [turn.text for completion in first[0] for turn in completion.turns]
    assert len(set(texts)) == len(texts)


def test_an_episode_of_one_turn_is_a_response():
    engine, conversation = wrapped(Scripted(last=1))
    request = asked(conversation)
    plain = tiny.finish(tiny.engine(text=True), [replace(request, episode=None)])
    (found,) = complete(engine, [request])
    for i, completion in enumerate(found):
        alone = plain["r", i]
        assert completion.token_ids.tolist() == alone.token_ids.tolist()
        assert completion.logprobs.tolist() == alone.logprobs.tolist()
        assert (completion.params, completion.text) == (alone.params, alone.text)


def test_requests_without_an_episode_pass_through():
    engine, _ = wrapped(Scripted())
    (found,) = complete(engine, [tiny.request("plain", n=2)])
    tiny.assert_same(
        {("plain", c.sample_index): c for c in found},
        tiny.finish(tiny.engine(text=True), [tiny.request("plain", n=2)]),
    )
    assert all(c.turns == () for c in found)


def test_all_episodes_take_a_turn_before_environments_step():
    environments = Scripted(last=2)
    play(environments, [("a", 2, 0), ("b", 1, 1)], turn_tokens=4)
    names = ["a/0", "a/1", "b/0"]
    assert environments.calls == [("reset", names), ("step", names), ("step", names)]


@pytest.mark.parametrize(
    ("limits", "params", "turns"),
    [
        ({"turns": 2, "turn_tokens": 4}, {}, 2),
        ({"turn_tokens": 4}, {"max_tokens": 30}, None),
        ({"turn_tokens": 4, "context": 40}, {}, None),
        ({}, {"max_tokens": 5}, 1),
    ],
)
def test_limits_truncate_an_episode(limits, params, turns):
    found, conversation = play(Scripted(last=99), params=params, **limits)
    start = len(conversation.open(START))
    for completion in found[0]:
        assert completion.finish is Finish.LENGTH
        assert completion.sampled[-1]  # no message after the last turn
        assert len(completion.token_ids) <= params.get("max_tokens", 60)
        assert start + len(completion.token_ids) <= limits.get("context", 96)
        assert turns is None or len(completion.turns) == turns


@pytest.mark.parametrize(
    ("limits", "params", "limit"),
    [
        ({"turns": 2, "turn_tokens": 4}, {}, Limit.TURNS),
        ({"turn_tokens": 4}, {"max_tokens": 30}, Limit.TOKENS),
        ({}, {"max_tokens": 5}, Limit.TOKENS),
        ({"turn_tokens": 4, "context": 40}, {}, Limit.CONTEXT),
        ({"turn_tokens": 4, "seconds": 1.9}, {}, Limit.TIME),
        ({"turn_tokens": 4, "turns": 8, "seconds": 99.0, "context": 200}, {}, Limit.TOKENS),
    ],
)
def test_the_limit_is_recorded(limits, params, limit):
    environments = Scripted(last=99, seconds=0.5)
    found, _ = play(environments, params=params, **limits)
    for completion in found[0]:
        assert (completion.finish, completion.limit) == (Finish.LENGTH, limit)
        if limit is Limit.TIME:
            assert len(completion.turns) == 3  # the reset and three steps take 2 s
    ended, _ = play(Scripted(last=2), turn_tokens=4)
    assert [(c.finish, c.limit) for c in ended[0]] == [(Finish.STOP, None)] * 3
    figures = describe([group_of(found[0])])
    shares = {
        x.removeprefix("rollout/truncated_"): y for x, y in figures.items() if "truncated_" in x
    }
    assert shares == {str(one): float(one is limit) for one in Limit}


def test_the_environment_hears_a_turn_that_ended_at_the_limit():
    """A turn that ended by itself is answered, even if no token has room after it."""
    free, _ = play(Scripted(last=1), params={"stop": STOPS})
    for i, completion in enumerate(free[0]):
        most = len(completion.token_ids)
        for last, finish, limit in (
            (1, Finish.STOP, None),
            (2, Finish.LENGTH, Limit.TOKENS),
        ):
            params = {"stop": STOPS, "max_tokens": most}
            again = play(Scripted(last=last), params=params)[0][0][i]
            assert again.token_ids.tolist() == completion.token_ids.tolist()
            assert (again.finish, again.limit) == (finish, limit)
            assert again.turns[0].messages


STOPS = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789")


@pytest.mark.parametrize("answer", ["ok", "stone a tonne"])
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_stop_strings_count_from_the_start_of_a_turn(answer, min_tokens):
    params = {"stop": STOPS, "min_tokens": min_tokens, "max_tokens": 150}
    environments = Scripted(last=4, answer=answer)
    found, conversation = play(environments, params=params, turn_tokens=12, context=190)
    inserted = conversation.between([{"role": "tool", "content": answer}]).tolist()
    stopped = 0
    for i, completion in enumerate(found[0]):
        assert (completion.finish, len(completion.turns)) == (Finish.STOP, 4)
        before = 0
        for turn, heard in zip(completion.turns, environments.heard[f"r/{i}"], strict=True):
            ids = completion.token_ids[turn.start : turn.end].tolist()
            text = tiny.tokenizer().decode(ids, skip_special=True)
            assert turn.text == heard == text  # one byte per token
            assert not any(stop in text[min_tokens:-1] for stop in STOPS)
            assert len(ids) >= min_tokens
            assert ids[-1] == tiny.END or text[-1:] in STOPS or len(ids) == 12
            if before:
                ended = completion.token_ids[before - 1] == tiny.END
                gap = completion.token_ids[before : turn.start].tolist()
                assert gap == [*([] if ended else [tiny.END]), *inserted]
            stopped += text[-1:] in STOPS
            before = turn.end
    assert stopped > 3


def test_a_stop_string_never_begins_in_an_observation():
    """The generation prompt ends with "a"; the engine must not read it together with a turn."""
    first, _ = play(Scripted(last=2), turn_tokens=6)
    for i, completion in enumerate(first[0]):
        turn = completion.turns[1]
        begins = tiny.tokenizer().decode(completion.token_ids[turn.start : turn.start + 1])
        stop = "a" + begins
        assert tiny.tokenizer().decode(completion.token_ids[: turn.start + 1]).endswith(stop)
        again = play(Scripted(last=2), params={"stop": (stop,)}, turn_tokens=6)[0][0][i]
        if stop not in first[0][i].turns[0].text and stop not in turn.text:
            assert again.token_ids.tolist() == completion.token_ids.tolist()


def test_think_budgets_count_from_the_start_of_a_turn():
    think = {"think_tokens": 3, "think_end": "</t>", "think_phrase": "</t>!"}
    environments = Scripted(last=3)
    found, conversation = play(
        environments, params={**think, "max_tokens": 90}, turn_tokens=12, context=190
    )
    phrase = tiny.tokenizer().encode("</t>!", add_special=False).tolist()
    model, forced = tiny.model(context=190), 0
    for completion in found[0]:
        assert len(completion.turns) == 3
        for turn in completion.turns:
            ids = completion.token_ids[turn.start : turn.end].tolist()
            own = completion.sampled[turn.start : turn.end].tolist()
            if len(ids) > 3:
                assert ids[3:8] == phrase
                assert own == [True] * 3 + [False] * 5 + [True] * (len(ids) - 8)
                forced += 1
            assert len(ids) <= 12
        expected = tiny.learner_logprobs(model, conversation.open(START), completion.token_ids, 1.0)
        own = completion.sampled
        np.testing.assert_allclose(completion.logprobs[own], expected[own], atol=tiny.CLOSE)
    assert forced > 3


def test_a_budget_without_room_is_left_out():
    """The last turns of an episode have fewer tokens than budget and phrase need."""
    think = {"think_tokens": 3, "think_end": "</t>", "think_phrase": "</t>!"}
    found, _ = play(Scripted(last=9), params={**think, "max_tokens": 42}, turn_tokens=10)
    for completion in found[0]:
        *turns, last = completion.turns
        assert completion.limit is Limit.TOKENS
        assert last.end - last.start <= 10
        if len(turns) == 2 and all(turn.end - turn.start == 10 for turn in turns):
            assert completion.sampled[last.start :].all()
    assert {len(c.turns) for c in found[0]} == {3}


def test_another_end_token_ends_a_turn():
    """<|b|> ends the model's turn as well; the template's own end token follows it."""
    params = {"stop_ids": (258, *range(97, 110)), "max_tokens": 90}
    found, conversation = play(Scripted(last=4), params=params, turn_tokens=14, context=190)
    others = 0
    for completion in found[0]:
        for turn, after in zip(completion.turns, completion.turns[1:], strict=False):
            last = completion.token_ids[turn.end - 1]
            gap = completion.token_ids[turn.end : after.start].tolist()
            others += last in params["stop_ids"]
            assert gap[:1] == (
                [tiny.END]
                if last != tiny.END
                else conversation.between([{"role": "tool", "content": "ok"}]).tolist()[:1]
            )
    assert others > 2


def test_a_template_without_end_tokens_gets_none_after_a_stop_string():
    chat = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found, conversation = play(
        Scripted(last=3),
        chat=chat,
        params={"stop": STOPS, "max_tokens": 90},
        turn_tokens=9,
        context=190,
    )
    inserted = conversation.between([{"role": "tool", "content": "ok"}]).tolist()
    for completion in found[0]:
        for turn, after in zip(completion.turns, completion.turns[1:], strict=False):
            assert completion.token_ids[turn.end : after.start].tolist() == inserted


@pytest.mark.parametrize("live", [1, 2, 3, 5])
def test_live_episodes_are_bounded_and_repeat(live):
    requests = [("a", 3, 0), ("b", 3, 1), ("c", 1, 2)]
    whole, _ = play(Scripted(last=2), requests, turn_tokens=6)
    runs = []
    for _ in range(2):
        environments = Scripted(last=2)
        most = []
        original = environments.step

        def step(actions, environments=environments, original=original, most=most):
            most.append(len(environments.live))
            return original(actions)

        environments.step = step
        found, _ = play(environments, requests, turn_tokens=6, live=live)
        assert max(most) == live
        runs.append((found, environments.calls))
    (first, calls), (again, more) = runs
    assert calls == more
    for groups in (first, whole):
        for a, b in zip(sum(groups, ()), sum(again, ()), strict=True):
            assert (a.request_id, a.sample_index) == (b.request_id, b.sample_index)
            assert a.token_ids.tolist() == b.token_ids.tolist()
            if groups is first:
                assert a.logprobs.tolist() == b.logprobs.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tiny.CLOSE)


def test_queued_episodes_begin_as_others_end():
    """Those that fail at once take no place."""
    environments = Scripted(last=1, fails=[("reset", "a/0"), ("reset", "a/1"), ("reset", "b/0")])
    found, _ = play(environments, [("a", 3, 0), ("b", 2, 1)], turn_tokens=4, live=2)
    assert environments.began == [["a/0", "a/1"], ["a/2", "b/0"], ["b/1"]]
    errors = [completion.turns[-1].error for group in found for completion in group]
    assert errors == ["reset: no", "reset: no", None, "reset: no", None]


def test_weights_that_are_loaded_between_turns():
    """Tokens have the version that sampled them, in both turns; inserted tokens have the version
    before them."""
    other = tiny.model(seed=3)
    engine, conversation = wrapped(Scripted(last=2), turn_tokens=6)
    engine.submit(asked(conversation))
    done = []
    while engine.unfinished:
        done += engine.step()
        turns = [len(play.turns) for play in engine._live.values()]
        if turns == [1, 1, 1] and engine.version == 0:
            engine.load(tiny.weights(other, 7))
    models = {0: tiny.model(), 7: other}
    for completion in done:
        first, second = completion.turns
        assert set(completion.versions[: first.end]) == {0}
        assert set(completion.versions[second.start :]) == {7}
        for version, turn in ((0, first), (7, second)):
            expected = tiny.learner_logprobs(
                models[version], conversation.open(START), completion.token_ids, 1.0
            )
            own = slice(turn.start, turn.end)
            np.testing.assert_allclose(completion.logprobs[own], expected[own], atol=tiny.CLOSE)


def test_an_engine_that_fails_ends_the_environments():
    environments = Scripted(last=9)
    engine, conversation = wrapped(environments)
    engine.submit(asked(conversation))
    engine.step()
    assert len(environments.live) == 3

    def fail():
        raise EngineError("no more")

    engine.engine.step = fail
    with pytest.raises(EngineError, match="no more"):
        engine.step()
    assert environments.live == {}


@pytest.mark.parametrize("live", [2, 256])
def test_free_episodes_have_the_tokens_of_lockstep(live):
    """Whatever the environments take: they wait for nobody, and slow ones delay nobody."""
    requests = [("a", 3, 0), ("b", 2, 1)]
    fails = [("reset", "a/1"), ("step", "b/1")]
    settings = {"turn_tokens": 6, "params": {"temperature": 0.7}}
    whole, _ = play(Scripted(last=3, fails=fails), requests, **settings)
    delays = {"a/0": 25, "b/0": 3}
    environments = Slow(lambda name: delays.get(name, 0), last=3, fails=fails)
    found, _ = play(environments, requests, pace="free", live=live, **settings)
    assert any(call == "step" and len(names) == 1 for call, names in environments.calls)
    for a, b in zip(sum(whole, ()), sum(found, ()), strict=True):
        assert (a.request_id, a.sample_index, a.turns) == (b.request_id, b.sample_index, b.turns)
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tiny.CLOSE)


def test_free_episodes_go_on_while_others_wait():
    environments = Slow(lambda name: 1000 if name == "a/0" else 0, last=3)
    engine, conversation = wrapped(environments, pace="free", turn_tokens=4)
    engine.submit(asked(conversation, "a", 3))
    done = []
    while len(done) < 2:
        done += engine.step()
    assert {c.sample_index for c in done} == {1, 2}
    assert environments.heard["a/0"] == []
    assert engine.unfinished == 1
    while engine.unfinished:  # the engine has no work: a step waits for the environment
        done += engine.step()
    assert len(done[-1].turns) == 3


def test_a_minimum_beyond_a_turn_makes_turns_as_long_as_they_may_be():
    found, _ = play(Scripted(last=9), params={"min_tokens": 50}, turn_tokens=4)
    for completion in found[0]:
        assert len(completion.token_ids) >= 50
        assert {turn.end - turn.start for turn in completion.turns[:-1]} == {4}


def test_long_messages_are_cut_with_a_marker():
    found, _ = play(Scripted(last=2, answer="0123456789"), turn_tokens=4, observation_tokens=4)
    for completion in found[0]:
        assert completion.turns[0].messages[0]["content"] == "0123" + CUT
        first, second = completion.turns
        gap = completion.token_ids[first.end : second.start].tolist()
        assert "0123" + CUT in tiny.tokenizer().decode(gap)


def test_environments_that_fail_end_their_episode_alone():
    fails = [("reset", "a/1"), ("step", "a/2")]
    found, _ = play(Scripted(last=2, fails=fails), [("a", 4, 0)], turn_tokens=4)
    errors = [completion.turns[-1].error for completion in found[0]]
    assert errors == [None, "reset: no", "step: no", None]
    assert [len(c.turns) for c in found[0]] == [2, 1, 1, 2]
    whole, _ = play(Scripted(last=2), [("a", 4, 0)], turn_tokens=4)
    for i in (0, 3):
        assert found[0][i].token_ids.tolist() == whole[0][i].token_ids.tolist()


FORGETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|a|>{{ m.role[0] }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and m.content[:7] != 'burnish' %}"
    "{{ m.content[2:] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>a{% endif %}"
)
"""Leaves out the first two characters, the thought, of turns before the last user message."""


def contexts(completion, prompt):
    """Each sequence of an episode: its prompt, and the slice of its response."""
    starts = list(completion.sequences)
    if not starts or starts[0].start:
        starts = [SequenceStart(0, prompt), *starts]
    ends = [*(one.start for one in starts[1:]), len(completion.token_ids)]
    return [(one.prompt, slice(one.start, end)) for one, end in zip(starts, ends, strict=True)]


def assert_sampled_in_context(completion, prompt, model):
    for context, part in contexts(completion, prompt):
        expected = tiny.learner_logprobs(model, context, completion.token_ids[part], 1.0)
        own = completion.sampled[part]
        np.testing.assert_allclose(
            completion.logprobs[part][own], expected[own], atol=tiny.CLOSE, rtol=1e-5
        )


@pytest.mark.parametrize("roles", ["t", "u", "tu", "ttu"])
def test_a_template_that_rewrites_history_is_followed(roles):
    environments, limits = Scripted(last=5, roles=roles), {"turn_tokens": 6, "context": 260}
    found, conversation = play(
        environments, params={"max_tokens": 120}, chat=FORGETS, follows=True, **limits
    )
    model, prompt = tiny.model(context=260), conversation.open(START)
    for i, completion in enumerate(found[0]):
        assert (completion.finish, len(completion.turns)) == (Finish.STOP, 5)
        assert_sampled_in_context(completion, prompt, model)
        messages, starts = list(START), {one.start: one.prompt for one in completion.sequences}
        assert len(starts) == len(completion.sequences)
        assert set(starts) <= {turn.start for turn in completion.turns[1:]}
        for number, turn in enumerate(completion.turns):
            if turn.start in starts:  # after a user message, in the template's own text
                assert messages[-1]["role"] == "user"
                assert starts[turn.start].tolist() == conversation.open(messages).tolist()
            elif number:
                before = completion.turns[number - 1]
                assert messages[-1]["role"] == "tool" or not before.text
                gap = completion.token_ids[before.end : turn.start]
                assert not completion.sampled[before.end : turn.start].any()
                after = conversation.between(before.messages).tolist()
                assert gap.tolist()[-len(after) :] == after
            own = completion.token_ids[turn.start : turn.end]
            assert tiny.tokenizer().decode(own, skip_special=True) == turn.text
            assert turn.text == environments.heard[f"r/{i}"][number]
            messages += [{"role": "assistant", "content": turn.text}, *turn.messages]
        assert ("u" in roles) == bool(starts)


@pytest.mark.parametrize("roles", ["u", "tu"])
def test_appending_keeps_what_the_template_would_rewrite(roles):
    found, conversation = play(Scripted(roles=roles), chat=FORGETS, turn_tokens=6, context=190)
    for completion in found[0]:
        assert completion.sequences == ()
        assert_sampled_in_context(completion, conversation.open(START), tiny.model(context=190))


def test_following_an_append_only_template_changes_nothing():
    whole, _ = play(Scripted(last=4, roles="ut"), turn_tokens=6)
    followed, _ = play(Scripted(last=4, roles="ut"), turn_tokens=6, follows=True)
    for a, b in zip(whole[0], followed[0], strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()
        assert b.sequences == ()


def test_each_token_has_its_own_draw(monkeypatch):
    """The position of a draw is the token's index in the episode, whatever its sequence."""
    drawn, original = [], sampler.draws

    def recorded(samples, steps, device):
        for one in samples:
            request = one.group.request
            drawn.append((request.first + one.index, request.position + len(one.logprobs)))
        return original(samples, steps, device)

    monkeypatch.setattr(sampler, "draws", recorded)
    environments, params = Scripted(last=5, roles="u"), {"max_tokens": 120}
    given = {"chat": FORGETS, "follows": True, "context": 260, "turn_tokens": 1}
    found, _ = play(environments, params=params, **given)
    for sample, completion in enumerate(found[0]):
        assert len(completion.sequences) > 2
        positions = [position for i, position in drawn if i == sample]
        assert positions == np.flatnonzero(completion.sampled).tolist()


@pytest.mark.parametrize(
    ("limits", "params", "limit"),
    [
        ({"turns": 3}, {}, Limit.TURNS),
        ({}, {"max_tokens": 12}, Limit.TOKENS),
        ({"context": 40}, {}, Limit.CONTEXT),
        ({"total": 70}, {}, Limit.TOKENS),
    ],
)
def test_limits_of_several_sequences(limits, params, limit):
    given = {"chat": FORGETS, "follows": True, "turn_tokens": 5, **limits}
    params = {"max_tokens": 80, "think_tokens": 2, "think_end": "!", "think_phrase": "!", **params}
    found, conversation = play(Scripted(last=99, roles="u"), params=params, **given)
    prompt = conversation.open(START)
    for completion in found[0]:
        assert (completion.finish, completion.limit) == (Finish.LENGTH, limit)
        assert len(completion.token_ids) <= params["max_tokens"]
        sizes = [
            len(context) + len(completion.token_ids[part])
            for context, part in contexts(completion, prompt)
        ]
        assert max(sizes) <= limits.get("context", 96)
        assert sum(sizes) <= limits.get("total", 10_000)
        assert len(sizes) > 1
        assert all(one.start < len(completion.token_ids) for one in completion.sequences)


def test_other_first_messages_have_a_prompt_of_their_own():
    """Of an environment that is not deterministic: each episode is sampled after its own prompt,
    with the draws that it would have had alone."""

    def starts(name):
        return START if name.endswith("1") else ({"role": "user", "content": f"go {name}"},)

    environments = Scripted(last=3, starts=starts, deterministic=False)
    found, conversation = play(environments, [("a", 3, 0)], turn_tokens=6)
    model = tiny.model()
    for i, completion in enumerate(found[0]):
        assert_sampled_in_context(completion, conversation.open(START), model)
        if i == 1:
            assert (completion.sequences, completion.first_messages) == ((), None)
            continue
        ((start, prompt, _),) = completion.sequences
        assert (start, completion.first_messages) == (0, starts(f"a/{i}"))
        assert prompt.tolist() == conversation.open(starts(f"a/{i}")).tolist()
    shared, _ = play(Scripted(last=3), [("a", 3, 0)], turn_tokens=6)
    assert shared[0][1].token_ids.tolist() == found[0][1].token_ids.tolist()


def test_first_messages_without_room_are_an_error():
    starts = ({"role": "user", "content": "x" * 92},)
    found, _ = play(Scripted(starts=starts, deterministic=False), [("a", 2, 0)])
    for completion in found[0]:
        assert "the first messages have 97 tokens" in completion.turns[0].error


def test_first_messages_that_differ_are_an_error():
    environments = Scripted(starts=({"role": "user", "content": "else"},))
    found, _ = play(environments, [("a", 1, 0)])
    assert "draw all random choices from the seed" in found[0][0].turns[0].error


@pytest.mark.parametrize("pace", ["lockstep", "free"])
@pytest.mark.parametrize("live", [1, 3, 256])
@pytest.mark.parametrize("steps", range(0, 18, 2))
def test_aborted_episodes_return_what_they_have(steps, live, pace):
    """Before they begin, in the first turn, between two turns, in a later turn, while queued behind
    others, and while their environments are called."""
    environments = Scripted(last=9) if pace == "lockstep" else Slow(lambda name: 3, last=9)
    engine, conversation = wrapped(environments, turn_tokens=4, live=live, pace=pace)
    for name in ("a", "b"):
        engine.submit(asked(conversation, name, 2))
    done = [completion for _ in range(steps) for completion in engine.step()]
    assert done == []
    engine.abort("a")
    done = engine.step()
    aborted = [c for c in done if c.request_id == "a"]
    assert sorted(c.sample_index for c in aborted) == [0, 1]
    assert {c.finish for c in aborted} == {Finish.ABORT}
    assert not [name for name in environments.live if name.startswith("a")]
    while engine.unfinished:
        done += engine.step()
    others = [c for c in done if c.request_id == "b"]
    assert len(others) == 2
    assert all(c.finish is not Finish.ABORT for c in others)
    assert environments.live == {}


def test_episodes_that_fail_to_start_are_returned_after_an_abort():
    environments = Scripted(last=2, fails=[("reset", "a/1")])
    engine, conversation = wrapped(environments, turn_tokens=4)
    engine.submit(asked(conversation, "a", 2))
    engine.abort("b")
    assert engine.unfinished == 2
    done = []
    while engine.unfinished:
        done += engine.step()
    assert sorted(c.sample_index for c in done) == [0, 1]
    assert [c.turns[-1].error for c in done if c.sample_index] == ["reset: no"]


def test_a_model_without_a_template():
    found, conversation = play(Scripted(last=2), chat=None, turn_tokens=4)
    gap = found[0][0].token_ids[found[0][0].turns[0].end : found[0][0].turns[1].start].tolist()
    assert gap[-3:] == conversation.between([{"content": "ok"}]).tolist()


def test_progress_shows_the_turn():
    seen = []
    with showing(seen.append):
        begin("generate", "sampling", total=3)
        play(Scripted(last=2), turn_tokens=3, turns=5)
    shown = [progress.turn for progress in seen if progress.turn]
    waiting = ", waiting for 3 environments"
    assert shown == [
        "turn 1 of 5",
        f"turn 1 of 5{waiting}",
        "turn 2 of 5",
        f"turn 2 of 5{waiting}",
    ]


def test_turns_of_an_unfinished_episode_can_be_read():
    engine, conversation = wrapped(Scripted(last=3), turn_tokens=3)
    engine.submit(asked(conversation, n=1))
    counts, done = [], []
    while not done:
        done = engine.step()
        counts.append(len(engine.turns_of("r")))
    assert sorted({*counts}) == [0, 1, 2]
    assert engine.turns_of("r") == ()  # it has ended
    assert len(done[0].turns) == 3
