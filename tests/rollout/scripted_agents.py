"""Agents as generators in this process: they take the places of the agents' processes and of the
server, so that a test needs no HTTP."""

import json
from datetime import datetime

import numpy as np

from burnish.engine.protocol import Request
from burnish.environments.protocol import Observation
from burnish.rollout.agent_answers import AgentAnswers
from burnish.rollout.agents import AgentEngine, AgentLimits
from burnish.rollout.rollout import complete
from burnish.types import Episode, SamplingParams
from tests.engine import tiny

TEMPLATE = (
    "{% for m in messages %}<|a|>{{ m.role[0] }}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>a{% endif %}"
)
ROW = {"n": 1}


class Failed(Exception):
    """The server has refused a request."""


class ScriptedAgents:
    """``agent(row, sample)`` is a generator: it yields a list of requests, receives the list of
    their answers, and returns its result. A list may end with None to go on without answers."""

    def __init__(self, agent, delay=lambda session: 0):
        self.agent, self.delay = agent, delay
        self.generation, self.waited, self.readable = 1, 0.0, []
        self.agents, self.results, self.left, self.calls = {}, {}, {}, {}
        self.incoming, self.begun, self.ended, self.number = [], [], [], 0

    # The server.
    def start(self):
        pass

    def base_url(self, session):
        return session

    def receive(self):
        found, self.incoming = self.incoming, []
        return found if found is None or not found else self._through_json(found)

    def _through_json(self, found):
        return json.loads(json.dumps(found))

    def answer(self, generation, call, reply):
        if generation != self.generation:
            return
        session, place = self.calls.pop(call)
        if session not in self.agents:
            return
        own = self.agents[session]
        own["replies"][place] = json.loads(json.dumps(reply))
        if len(own["replies"]) == own["count"]:
            self._go_on(session, [own["replies"][i] for i in range(own["count"])])

    def die(self):
        """Lose all calls, as a server that is killed and started again."""
        self.incoming, self.generation = None, self.generation + 1
        self.calls = {}

    # The processes.
    def begin_reset(self, episodes):
        for session, row, seed in episodes:
            assert (row, seed) == (ROW, 5)
            sample = int(session.rpartition("-")[0].rpartition(".")[2])
            self.begun.append(session)
            self.agents[session] = {"run": self.agent(row, sample), "replies": {}, "count": 0}
            self.results[session] = Observation(
                [{"role": "user", "content": "begin"}], None, False, {}
            )

    def begin_step(self, actions):
        for session, message in actions:
            assert message["content"] == session
            self._go_on(session, None)

    def poll(self, seconds):
        found, self.results = self.results, {}
        return found

    def end(self, names, *, waits=True):
        self.ended += names
        for name in names:
            self.agents.pop(name, None)
            self.results.pop(name, None)

    def _go_on(self, session, replies):
        own = self.agents[session]
        try:
            asked = own["run"].send(replies)
        except StopIteration as stop:
            self.results[session] = self._observation(stop.value)
            return
        except Failed as error:
            self.results[session] = Observation(
                [], None, False, {}, f"Failed: {error}", was_raised=True
            )
            return
        own["replies"], own["count"] = {}, len([one for one in asked if one is not None])
        for place, fields in enumerate(one for one in asked if one is not None):
            self.number += 1
            self.calls[self.number] = session, place
            self.incoming = self.incoming or []
            self.incoming.append({"call": self.number, "session": session, **fields})
        if len(asked) != own["count"]:
            self._go_on(session, None)

    def _observation(self, value):
        if isinstance(value, Observation):
            return value
        given = value if isinstance(value, dict) else {"reward": value}
        rest = {k: v for k, v in given.items() if k not in ("reward", "unlearned")}
        messages = []
        if "unlearned" in given:
            messages = [{"role": "tool", "content": json.dumps(given["unlearned"])}]
        return Observation(messages, given["reward"], True, rest)


def chat(*messages, **fields):
    """The fields of a chat request. Messages are pairs of role and content, or dicts."""
    whole = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return {"kind": "chat", "messages": whole, "tools": [], "n": 1, "retry": 0, **fields}


def text_of(reply, choice=0):
    """The text of an answer; raises Failed if the request was refused."""
    if "error" in reply:
        raise Failed(reply["error"]["message"])
    return reply["choices"][choice]["message"]


class Answers(AgentAnswers):
    """Keeps the request and the context of each draft."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.drafts = []

    def draft(self, record, fields, choice):
        made = super().draft(record, fields, choice)
        begun = [] if made.begun is None else [made.begun.token_ids]
        self.drafts.append((fields, np.concatenate([made.sequence.prompt, *begun]), made))
        return made


def wrapped(
    agents, *, engine=None, pace="lockstep", follows=False, template=TEMPLATE, most=64, **limits
):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    limits = AgentLimits(**{"context": 512, "turns": most, **limits})
    engine = engine or tiny.engine(
        text=True, own=tiny.model(context=limits.context), tokens=1 << 16, max_running=64
    )
    answers = Answers(tokenizer, None, now=datetime(2026, 1, 1))
    return AgentEngine(engine, agents, agents, answers, limits, pace, follows=follows), answers


def asked(name="r", n=3, group=0, **params):
    params = SamplingParams(**{"max_tokens": 400, **params})
    nothing = np.array([tiny.END], np.int32)
    return Request(name, nothing, n, params, group, episode=Episode(ROW, 5, ()))


def run(agents, requests=(("r", 3, 0),), params=None, **how):
    engine, answers = wrapped(agents, **how)
    found = complete(engine, [asked(*one, **(params or {})) for one in requests])
    while engine.engine.unfinished:
        engine.engine.step()
    assert engine.unfinished == 0
    assert set(agents.begun) == set(agents.ended)
    return found, engine, answers


def sequences_of(completion):
    """The sequences of an episode: pairs of the prompt and the slice of the response."""
    ends = [*(one.start for one in completion.sequences[1:]), len(completion.token_ids)]
    return [
        (s.prompt, slice(s.start, end)) for s, end in zip(completion.sequences, ends, strict=True)
    ]


def check_rescored(model, completion, temperature=1.0):
    """Each sampled token has the log-probability that the model gives it in its sequence."""
    for prompt, part in sequences_of(completion):
        own = completion.sampled[part]
        given = tiny.learner_logprobs(model, prompt, completion.token_ids[part], temperature)
        difference = np.abs(given[own] - completion.logprobs[part][own])
        assert difference.mean() <= 1e-5
        assert difference.max() <= 1e-4
