"""Agents: each sampled token is in one sequence, in the context in which it was sampled, whatever
an agent does with its histories."""

import json
import random
import time

import numpy as np
import pytest

from burnish.console.progress import showing
from burnish.environments.pool import UNREPLAYED
from burnish.environments.protocol import Observation
from burnish.rollout import agents
from burnish.rollout.histories import canonical
from burnish.rollout.packing import pack
from burnish.rollout.rollout import complete
from burnish.rollout.saved_groups import load_held, save_held
from burnish.runs.responses import rows
from burnish.types import Episode, Finish, Grade, Group, Limit, Prompt
from tests.engine import tiny
from tests.rollout.scripted_agents import (
    TEMPLATE,
    ScriptedAgents,
    asked,
    chat,
    check_rescored,
    run,
    sequences_of,
    text_of,
    wrapped,
)

SHORT = {"turn_tokens": 6}


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    """These agents are in this process, so that there is nothing to wait for."""
    monkeypatch.setattr(agents, "WAIT_SECONDS", 1e-3)


def talk(turns, reward=1.0):
    """An agent with one conversation."""

    def agent(row, sample):
        messages = [{"role": "user", "content": "go"}]
        for _ in range(turns):
            (reply,) = yield [chat(*messages)]
            messages += [text_of(reply), {"role": "tool", "content": "ok", "tool_call_id": "1"}]
        return reward

    return agent


def metrics(completion):
    return completion.turns[-1].metrics


def model():
    return tiny.model(context=512)


def test_a_conversation_is_one_sequence():
    (found,), engine, _ = run(ScriptedAgents(talk(3)), params={"temperature": 0.7}, **SHORT)
    for i, completion in enumerate(found):
        assert (completion.sample_index, completion.finish) == (i, Finish.STOP)
        assert len(completion.sequences) == 1
        assert len(completion.turns) == 3
        assert [turn.reward for turn in completion.turns] == [None, None, 1.0]
        assert completion.turns[0].messages == ({"role": "tool", "content": "ok"},)
        assert metrics(completion)["requests"] == 3
        assert metrics(completion)["rewritten"] == 0
        check_rescored(model(), completion, 0.7)
    assert engine.engine.sampled == sum(int(c.sampled.sum()) for c in found)


def test_lockstep_repeats_bit_for_bit():
    runs = [run(ScriptedAgents(talk(3)), [("a", 4, 2), ("b", 4, 3)], **SHORT)[0] for _ in range(2)]
    for one, two in zip(*(sum(found, ()) for found in runs), strict=True):
        assert one.token_ids.tobytes() == two.token_ids.tobytes()
        assert one.logprobs.tobytes() == two.logprobs.tobytes()


def planner(row, sample):
    """Two conversations that alternate, and two solvers at once."""
    plan, solve = [{"role": "user", "content": "plan"}], [{"role": "user", "content": "solve"}]
    for _ in range(2):
        (reply,) = yield [chat(*plan)]
        plan += [text_of(reply), {"role": "user", "content": "next"}]
        replies = yield [chat(*solve), chat(*solve, n=2)]
        solve += [text_of(replies[1], 1), {"role": "user", "content": "more"}]
    return {"reward": 0.5, "steps": 2}


@pytest.mark.parametrize("pace", ["lockstep", "free"])
def test_parallel_conversations_and_choices_are_sequences_of_their_own(pace):
    (found,), engine, _ = run(ScriptedAgents(planner), pace=pace, **SHORT)
    for completion in found:
        check_rescored(model(), completion)
        assert metrics(completion)["requests"] == 6
        assert metrics(completion)["steps"] == 2
        assert len(completion.turns) == 2 + 2 * 3
        # The plan; three first solutions; of the second three, one extends a first one.
        assert len(completion.sequences) == 1 + 3 + 2
        assert all(one.messages for one in completion.sequences)
        starts = [turn.start for turn in completion.turns]
        assert starts == sorted(starts)
    assert engine.engine.sampled == sum(int(c.sampled.sum()) for c in found)


def test_no_draws_repeat_within_an_episode():
    (found,), *_ = run(ScriptedAgents(planner), [("r", 2, 0)], **SHORT)
    texts = [c.token_ids[t.start : t.end].tolist() for c in found for t in c.turns]
    assert len(set(map(tuple, texts))) == len(texts)


def test_a_repeated_request_is_answered_from_the_record():
    def agent(row, sample):
        one = chat(("user", "go"))
        (first,) = yield [one]
        (again,) = yield [{**one, "retry": 1}]
        assert again == first
        (other,) = yield [one]
        assert other != first
        both = yield [chat(("user", "twice")), chat(("user", "twice"), retry=1)]
        assert both[0] == both[1]
        return 1

    (found,), *_ = run(ScriptedAgents(agent), **SHORT)
    for completion in found:
        assert len(completion.turns) == 3
        assert metrics(completion)["repeated_requests"] == 2


def rewriting(seed):
    """An agent that changes its histories at random, and sends old ones again."""

    def agent(row, sample):
        draw = random.Random(1000 * seed + sample)
        known = [[{"role": "user", "content": "go"}]]
        tools = [[], [{"type": "function", "function": {"name": "f", "parameters": {}}}]]
        for _ in range(draw.randrange(3, 9)):
            messages = [dict(one) for one in draw.choice(known[-3:])]
            chosen = draw.random()
            if chosen < 0.15:  # an edit
                one = draw.choice(messages)
                one["content"] = (one["content"] or "") + draw.choice(["", "!", " "])
            elif chosen < 0.3 and len(messages) > 1:  # a deletion
                del messages[draw.randrange(len(messages))]
            elif chosen < 0.4:  # a system prompt
                messages = [m for m in messages if m["role"] != "system"]
                messages.insert(0, {"role": "system", "content": draw.choice(["s", "t"])})
            elif chosen < 0.5 and len(messages) > 2:  # two messages change places
                i = draw.randrange(len(messages) - 1)
                messages[i], messages[i + 1] = messages[i + 1], messages[i]
            if messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": "and"})
            n = draw.choice([1, 1, 1, 2])
            fields = chat(*messages, n=n, tools=draw.choice([tools[0], tools[0], tools[1]]))
            (reply,) = yield [fields]
            for choice in range(n):
                answer = text_of(reply, choice)
                results = [
                    {"role": "tool", "content": str(draw.randrange(3)), "tool_call_id": str(i)}
                    for i in range(draw.choice([0, 1, 2]))
                ]
                draw.shuffle(results)
                known.append([*messages, answer, *(results or [{"role": "user", "content": "?"}])])
        return 1.0

    return agent


def read(messages):
    """The template's text of messages without its special tokens."""
    return "".join(m["role"][0] + (m["content"] or "") for m in messages) + "a"


def without_marks(text):
    """The text of a context whose prompt has results of tools as the template can't write them."""
    marks = {"\n</tool_response>\n<tool_response>\n": "t", "u<tool_response>\n": "t"}
    for mark, role in (marks | {"\n</tool_response>": ""}).items():
        text = text.replace(mark, role)
    return text


@pytest.mark.parametrize("seed", range(3))
def test_rewritten_histories_never_put_tokens_into_another_context(seed):
    agents = ScriptedAgents(rewriting(seed))
    (found,), engine, answers = run(
        agents,
        [("r", 6, seed)],
        context=2048,
        most=100,
        turn_tokens=4,
        params={"max_tokens": 4000},
    )
    assert all(completion.turns[-1].error is None for completion in found)
    decode = tiny.tokenizer().decode
    contexts = set()
    for fields, ids, _ in answers.drafts:
        if not fields["tools"]:
            assert without_marks(decode(ids, skip_special=True)) == read(fields["messages"])
        contexts.add(ids.tobytes())
    learner = tiny.model(context=2048)
    for completion in found:
        check_rescored(learner, completion)
        ends = np.zeros(len(completion.token_ids), bool)
        for prompt, part in sequences_of(completion):
            for turn in completion.turns:
                if part.start <= turn.start < part.stop:
                    given = [prompt, completion.token_ids[part.start : turn.start]]
                    assert np.concatenate(given).astype(np.int32).tobytes() in contexts
                    ends[turn.start : turn.end] = True
        assert (ends == completion.sampled).all()
    assert engine.engine.sampled == sum(int(c.sampled.sum()) for c in found)
    assert sum(metrics(c)["rewritten"] for c in found) > 0


def test_equal_messages_are_compared_by_value():
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'},
    }
    same = {"id": "2", "function": {"arguments": '{"b":2,"a":1}', "name": "f"}}
    other = {"id": "1", "function": {"name": "f", "arguments": '{"a": 2}'}}
    one, two, three = (
        canonical({"role": "assistant", "content": content, "tool_calls": [c], "name": None})
        for content, c in ((None, call), ("", same), ("", other))
    )
    assert one == two != three


@pytest.mark.parametrize(
    ("limits", "params", "limit"),
    [
        ({"most": 2, **SHORT}, {}, Limit.TURNS),
        ({"context": 40, **SHORT}, {}, Limit.CONTEXT),
        ({"turn_tokens": 8}, {"max_tokens": 17, "min_tokens": 8}, Limit.TOKENS),
        ({"total": 30, "turn_tokens": 8}, {"min_tokens": 8}, Limit.TOKENS),
    ],
)
def test_a_limit_truncates_an_episode(limits, params, limit):
    (found,), *_ = run(ScriptedAgents(talk(20)), params=params, **limits)
    for completion in found:
        assert (completion.finish, completion.limit) == (Finish.LENGTH, limit)
        assert completion.turns[-1].error is None
        assert completion.turns[-1].reward is None
        assert len(completion.token_ids) <= 17 or limit is not Limit.TOKENS or "total" in limits
        tokens = len(completion.token_ids) + sum(len(s.prompt) for s in completion.sequences)
        assert tokens <= limits.get("total", 10_000)


def test_an_agent_may_go_on_after_a_limit():
    def agent(row, sample):
        messages = [("user", "go")]
        for _ in range(9):
            (reply,) = yield [chat(*messages)]
            if "error" in reply:
                assert reply["error"]["code"] == "context_length_exceeded"
                return 0.25
        return 1.0

    (found,), *_ = run(ScriptedAgents(agent), most=3, **SHORT)
    for completion in found:
        assert completion.turns[-1].reward == 0.25
        assert completion.limit is Limit.TURNS


class Dying(ScriptedAgents):
    """A server that dies at the given numbers of answers."""

    def __init__(self, agent, at):
        super().__init__(agent)
        self.at, self.answered = list(at), 0

    def answer(self, generation, call, reply):
        self.answered += 1
        if self.at and self.answered >= self.at[0]:
            self.at.pop(0)
            self.die()
        super().answer(generation, call, reply)


@pytest.mark.parametrize("pace", ["lockstep", "free"])
def test_episodes_begin_again_when_the_server_dies(pace):
    (calm,), *_ = run(ScriptedAgents(talk(3)), **SHORT)
    agents = Dying(talk(3), [5])
    (found,), *_ = run(agents, pace=pace, **SHORT)
    assert len(agents.begun) == 6
    for one, two in zip(calm, found, strict=True):
        assert metrics(two)["restarts"] == 1
        assert metrics(two)["requests"] == 3
        assert one.token_ids.tolist() == two.token_ids.tolist()


def test_an_episode_whose_server_dies_twice_is_an_error():
    (found,), *_ = run(Dying(talk(3), [3, 6]), **SHORT)
    for completion in found:
        assert "killed twice" in completion.turns[-1].error
        assert completion.turns[-1].reward is None


def test_traces_are_apart_and_some_are_not_learned():
    def agent(row, sample):
        messages = [{"role": "user", "content": "go"}]
        (one,) = yield [chat(*messages, trace="a")]
        messages += [text_of(one), {"role": "user", "content": "on"}]
        yield [chat(*messages, trace="a")]
        yield [chat(*messages, trace="b")]  # not b's history
        return {"reward": 1.0, "unlearned": ["b"]}

    (found,), engine, _ = run(ScriptedAgents(agent), **SHORT)
    for completion in found:
        assert len(completion.sequences) == 1
        assert len(completion.turns) == 2
        assert metrics(completion)["sequences"] == 2
        assert metrics(completion)["rewritten"] == 1
        check_rescored(model(), completion)
    assert engine.engine.sampled > sum(int(c.sampled.sum()) for c in found)


def test_a_request_that_nobody_awaits_is_learned_if_it_was_sampled():
    def agent(row, sample):
        yield [chat(("user", "plan")), None]
        (reply,) = yield [chat(("user", "go"))]
        return len(text_of(reply)["content"]) / 10

    for pace in ("lockstep", "free"):
        (found,), engine, _ = run(ScriptedAgents(agent), pace=pace, **SHORT)
        for completion in found:
            assert completion.turns[-1].error is None
            check_rescored(model(), completion)
        assert engine.engine.sampled == sum(int(c.sampled.sum()) for c in found)


def test_an_agent_that_asks_nothing_or_only_wrongly_is_an_error():
    def silent(row, sample):
        return 1.0
        yield

    def unknown(row, sample):
        (reply,) = yield [chat(("user", "go"), session="other")]
        assert reply["error"]["status"] == 403
        return 1.0

    for agent in (silent, unknown):
        (found,), *_ = run(ScriptedAgents(agent), **SHORT)
        for completion in found:
            assert "without an answered request" in completion.turns[-1].error
            assert completion.turns[-1].reward is None


def test_an_aborted_group_ends_with_what_was_sampled():
    engine, _ = wrapped(ScriptedAgents(talk(9)), **SHORT)
    engine.submit(asked("a", 2))
    engine.submit(asked("b", 2, 1))
    done = []
    for step in range(4000):
        if step == 12:
            engine.abort("a")
        done += engine.step()
        if not engine.unfinished:
            break
    found = {(c.request_id, c.sample_index): c for c in done}
    assert [found["a", i].finish for i in range(2)] == [Finish.ABORT] * 2
    assert [found["b", i].finish for i in range(2)] == [Finish.STOP] * 2
    assert all(found["b", i].turns[-1].reward == 1.0 for i in range(2))
    for completion in found.values():
        check_rescored(model(), completion)


def test_an_agent_that_works_for_too_long_is_an_error_alone():
    class Slow(ScriptedAgents):
        def _go_on(self, session, replies):
            if "r.1-" in session and replies is not None:
                return  # it never comes back
            super()._go_on(session, replies)

    (found,), *_ = run(Slow(talk(2)), seconds=0.3, **SHORT)
    errors = [completion.turns[-1].error for completion in found]
    assert errors[0] is errors[2] is None
    assert "more than 0.3 s of its own (task.wall_seconds)" in errors[1]


REWRITING = (
    "{% for m in messages %}<|a|>{{ m.role[0] }}"
    "{{ m.content }}{% if m.role == 'assistant' and not loop.last %}?{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|a|>a{% endif %}"
)


@pytest.mark.parametrize(("follows", "count"), [(False, 1), (True, 3)])
def test_a_template_that_rewrites_begins_sequences_if_the_recipe_says_so(follows, count):
    (found,), *_ = run(ScriptedAgents(talk(3)), template=REWRITING, follows=follows, **SHORT)
    for completion in found:
        assert len(completion.sequences) == count
        assert metrics(completion)["rewritten"] == 0
        check_rescored(model(), completion)


def test_episodes_of_agents_are_saved_and_packed():
    (found,), *_ = run(ScriptedAgents(planner), **SHORT)
    prompt = Prompt("p", "", np.array([tiny.END], np.int32), "agent", episode=Episode({}, 5, ()))
    group = Group(0, prompt, found, tuple(Grade(float(i)) for i in range(3)))
    tensors, saved = save_held([[group]])
    ((again,),) = load_held(tensors, json.loads(json.dumps(saved)), lambda index: prompt)
    for one, two in zip(group.completions, again.completions, strict=True):
        assert [s.messages for s in one.sequences] == [s.messages for s in two.sequences]
        assert [s.start for s in one.sequences] == [s.start for s in two.sequences]
    batch = pack([group])
    # The first conversations share a prompt; all others have their own.
    assert int(batch.segment_is_prompt.sum()) == 1 + sum(len(c.sequences) - 1 for c in found)
    assert int(batch.is_action.sum()) == sum(int(c.sampled.sum()) for c in found)
    for number, completion in enumerate(found):
        own = batch.behavior_logprobs[batch.is_action & (batch.sample_ids == number)]
        assert own.tolist() == completion.logprobs[completion.sampled].tolist()


def test_rows_show_the_messages_of_each_conversation():
    (found,), *_ = run(ScriptedAgents(planner), [("r", 1, 0)], **SHORT)
    prompt = Prompt("p", "", np.array([tiny.END], np.int32), "agent", episode=Episode({}, 5, ()))
    group = Group(0, prompt, found, (Grade(1.0, metrics(found[0])),))
    decode = tiny.tokenizer().decode
    (row,) = rows(0, [group], decode=lambda ids: [decode([i]) for i in ids])
    first = [one["messages"][0]["content"] for one in row["sequences"]]
    assert first[:4] == ["plan", "solve", "solve", "solve"]
    assert row["first_messages"] == []


class Delayed(ScriptedAgents):
    """The results and requests of some episodes arrive only at a later step."""

    def __init__(self, agent, late):
        super().__init__(agent)
        self.late, self.held, self.seen = late, [], set()

    def receive(self):
        found = super().receive()
        late = [one for one in found if self.late("request", one["session"])]
        due, self.held = self.held, [[3, one] for one in late] + self.held
        self.held = [[left - 1, one] for left, one in self.held if left]
        ready = [one for left, one in due if not left]
        return [one for one in found if one not in late] + ready

    def poll(self, seconds):
        found = super().poll(seconds)
        ends = {name for name, one in found.items() if one.done and self.late("end", name)}
        late = ends - self.seen
        self.seen |= ends
        self.results |= {name: found.pop(name) for name in late}
        return found


def rounds_of(agents, monkeypatch, requests, **how):
    """The samples that the engine got in each round of lockstep."""
    rounds = []
    engine, _ = wrapped(agents, **how)
    submit, prepare = engine._submit_run, engine._submit

    def submit_run(run):
        rounds[-1] += [play.request.request_id + str(play.sample) for play, *_ in run]
        submit(run)

    def submit_all():
        rounds.append([])
        prepare()

    engine._submit_run, engine._submit = submit_run, submit_all
    extra = [asked("x", 1, 9)]

    def further(answered):
        return [extra.pop()] if extra and answered[0][0].request_id == "r" else []

    complete(engine, [asked(*one, min_tokens=6) for one in requests], further=further)
    return [sorted(one) for one in rounds if one]


@pytest.mark.parametrize("live", [2, 8])
@pytest.mark.parametrize(
    "late",
    [
        lambda kind, session: False,
        lambda kind, session: kind == "request",
        lambda kind, session: kind == "request" and session.startswith("s."),
        lambda kind, session: kind == "end",
    ],
    ids=["at once", "late requests", "late requests of one", "a late end"],
)
def test_a_round_of_lockstep_does_not_depend_on_the_time(monkeypatch, late, live):
    """Queued episodes, and those that the caller submits when a group ends, begin before the next
    round."""

    def agent(row, sample):
        for _ in range(1 + sample):
            yield [chat(("user", "go"))]
        return 1.0

    given = [("r", 1, 0), ("s", 4, 1)]
    found = rounds_of(Delayed(agent, late), monkeypatch, given, live=live, **SHORT)
    assert (
        found
        == {
            2: [["r0", "s0"], ["s1", "s2"], ["s1", "s2"], ["s2", "s3"]]
            + [["s3", "x0"]]
            + [["s3"]] * 2,
            8: [["r0", "s0", "s1", "s2", "s3"], ["s1", "s2", "s3", "x0"], ["s2", "s3"], ["s3"]],
        }[live]
    )


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (Observation([], None, False, {}, "KeyError: 'a'", was_raised=True), None),
        (Observation([], None, False, {}, "the agent returned nothing"), "returned nothing"),
        (Observation([], None, False, {}, "during step: out of memory"), "out of memory"),
    ],
)
def test_only_an_exception_of_the_agent_may_follow_from_a_limit(result, said):
    def agent(row, sample):
        for _ in range(3):
            yield [chat(("user", "go"))]
        return result

    (found,), *_ = run(ScriptedAgents(agent), most=2, **SHORT)
    for completion in found:
        assert (completion.finish, completion.limit) == (Finish.LENGTH, Limit.TURNS)
        assert completion.turns[-1].reward is None
        assert said in completion.turns[-1].error if said else not completion.turns[-1].error


def test_an_exception_before_the_first_answer_is_an_error_even_after_a_limit():
    def agent(row, sample):
        (reply,) = yield [chat(("user", "go" * 50))]
        text_of(reply)

    (found,), *_ = run(ScriptedAgents(agent), context=40, **SHORT)
    for completion in found:
        assert "40 tokens (the model's context)" in completion.turns[-1].error


def test_all_requests_of_an_episode_that_has_ended_are_refused():
    replies = []

    class Heard(ScriptedAgents):
        def answer(self, generation, call, reply):
            replies.append(reply)

    def agent(row, sample):
        yield [*(chat(("user", str(i))) for i in range(4)), None]
        return 1.0

    run(Heard(agent), [("r", 1, 0)], **SHORT)
    assert [reply["error"]["status"] for reply in replies] == [403] * 4


@pytest.mark.parametrize("pace", ["lockstep", "free"])
def test_only_accepted_requests_count_as_turns(pace):
    def agent(row, sample):
        bad = chat(("user", "bad"))
        (refused,) = yield [bad]
        assert "no bad words" in refused["error"]["message"]
        one = chat(("user", "go"), n=3)
        replies = yield [one, {**one, "retry": 1}, bad]
        assert [len(reply.get("choices", ())) for reply in replies] == [3, 3, 0]
        replies = yield [chat(("user", str(i))) for i in range(4)]
        assert [reply.get("error", {}).get("code") for reply in replies] == [
            None,
            *["context_length_exceeded"] * 3,
        ]
        assert "2 requests (task.turns)" in replies[1]["error"]["message"]
        return 1.0

    bad = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    how = {"template": bad + TEMPLATE, "pace": pace}
    (found,), *_ = run(ScriptedAgents(agent), most=2, **how, **SHORT)
    for completion in found:
        assert completion.turns[-1].error is None
        assert len(completion.turns) == 3 + 1
        assert completion.limit is Limit.TURNS


@pytest.mark.parametrize(
    ("choices", "room", "lengths", "limit"),
    [
        (4, 3, [1, 1, 1, 0], Limit.TOKENS),  # no room for the last one
        (2, 8, [4, 4], Limit.TOKENS),
        (1, 5, [5], Limit.TOKENS),
        (2, 12, [6, 6], None),  # as long as task.turn_tokens
    ],
)
def test_an_episode_reaches_its_limit_if_choices_are_cut(choices, room, lengths, limit):
    def agent(row, sample):
        (reply,) = yield [chat(("user", "go"), n=choices)]
        assert [one["finish_reason"] for one in reply["choices"]] == ["length"] * choices
        return 0.5

    params = {"max_tokens": room, "min_tokens": 6}
    (found,), *_ = run(ScriptedAgents(agent), params=params, **SHORT)
    for completion in found:
        assert [turn.end - turn.start for turn in completion.turns] == [n for n in lengths if n]
        assert completion.limit is limit
        assert completion.turns[-1].reward == 0.5


def test_tools_in_a_format_that_is_not_known_are_refused_before_the_answer_is_sampled():
    unknown = "{{ tools or '' }}" + TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}[[?]]{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    def agent(row, sample):
        (reply,) = yield [chat(("user", "go"), tools=tools)]
        assert reply["error"]["status"] == 400
        assert "task.tool_format = 'hermes'" in reply["error"]["message"]
        (reply,) = yield [chat(("user", "go"), tools=tools, tool_choice="none")]
        text_of(reply)
        return 1.0

    (found,), *_ = run(ScriptedAgents(agent), template=unknown, **SHORT)
    assert [(len(c.turns), c.turns[-1].error) for c in found] == [(1, None)] * 3


def test_an_agent_does_not_work_while_its_request_waits_at_the_server():
    def agent(row, sample):
        for _ in range(3):
            yield [chat(("user", "go"), arrived=time.monotonic())]
        return 1.0

    engine, _ = wrapped(ScriptedAgents(agent), seconds=0.5, **SHORT)
    engine.submit(asked())
    done = []
    while engine.unfinished:
        done += engine.step()
        time.sleep(0.2 if len(done) < 3 and not engine.engine.unfinished else 0)
    assert [completion.turns[-1].error for completion in done] == [None] * 3


KILLED = Observation(
    [],
    None,
    False,
    {},
    "the environment's process was killed by SIGKILL during step" + UNREPLAYED,
    was_killed=True,
    output="one\ntwo\n",
)


@pytest.mark.parametrize("pace", ["lockstep", "free"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_agent_whose_process_is_killed_begins_again_once(pace, times):
    left = [times]

    def agent(row, sample):
        reward = yield from talk(3)(row, sample)
        if sample == 1 and left[0]:
            left[0] -= 1
            return KILLED
        return reward

    (calm,), *_ = run(ScriptedAgents(talk(3)), **SHORT)
    notes = []
    with showing(lambda progress: notes.append(progress.doing)):
        (found,), *_ = run(ScriptedAgents(agent), pace=pace, **SHORT)
    assert [metrics(completion)["restarts"] for completion in found] == [0, 1, 0]
    assert any("note: the processes of 1 agent were killed; 1 episode restart" in x for x in notes)
    errors = [completion.turns[-1].error for completion in found]
    assert errors[0] is errors[2] is None
    assert (errors[1] is None) == (times == 1)
    if times == 2:
        assert errors[1] == (
            "the agent's process was lost twice: the agent's process was killed by SIGKILL while "
            "the agent ran; the end of its output:\n  one\n  two"
        )
    for one, two in zip(calm, found, strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()


@pytest.mark.parametrize(
    ("rewrites", "noted"), [(lambda turn: True, 1), (lambda turn: turn % 4 == 0, 0)]
)
def test_a_note_says_once_that_an_agent_rewrites_its_history(rewrites, noted):
    def agent(row, sample):
        messages = [{"role": "user", "content": "go"}]
        for turn in range(12):
            (reply,) = yield [chat(*messages)]
            messages += [text_of(reply), {"role": "user", "content": "on"}]
            if rewrites(turn):
                messages[0] = {"role": "user", "content": f"turn {turn}"}
        return 1.0

    notes = []
    with showing(lambda progress: notes.append(progress.doing)):
        (found,), *_ = run(ScriptedAgents(agent), context=2048, **SHORT)
    found = [text for text in notes if "rewrites its history" in text]
    assert len(found) == noted
    assert all("22 of 22 requests" in text for text in found)
