"""Runs of agents: they train as environments do, over real HTTP, and survive faults."""

import json
import os
import signal
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish import api
from burnish.errors import ConfigError, DataError, GraderError
from burnish.launch import local
from burnish.launch.resolve import resolve
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.rollout.rollout import complete, requests_of
from burnish.types import SamplingParams
from tests.environments.conftest import supervisor_of
from tests.loops.test_recorder import fingerprint, stopper
from tests.rollout.scripted_agents import check_rescored

EXAMPLES = Path(burnish.__file__).parents[1] / "examples"
GAME = """
def reward(heard):
    return (sum(map(ord, "".join(heard))) % 11) / 10

def answer(heard):
    return f"{len(heard)}: {sum(map(ord, ''.join(heard))) % 97}"

class Game:
    deterministic = True

    def reset(self, row, seed):
        self.heard = []
        return f"{row['n']}"

    def step(self, message):
        self.heard.append(message["content"])
        done = len(self.heard) == 3
        return {"messages": answer(self.heard), "reward": reward(self.heard) if done else None,
                "done": done}

async def play(client, row):
    heard, messages = [], [{"role": "user", "content": f"{row['n']}"}]
    while len(heard) < 3:
        reply = await client.chat.completions.create(model="any", messages=messages)
        heard.append(reply.choices[0].message.content)
        messages += [reply.choices[0].message, {"role": "user", "content": answer(heard)}]
    return {"reward": reward(heard), "heard": len(heard)}

async def two(client, row):
    import asyncio
    async def ask(text, **how):
        return await client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": text}], **how)
    plan = await ask(f"plan {row['n']}", temperature=0.1)
    said = plan.choices[0].message.content
    solved = await asyncio.gather(*(ask(f"solve {i} {said}", n=2) for i in range(2)))
    return len(solved[0].choices[1].message.content) % 3

async def fails(client, row):
    n = row["n"]
    if n == 0:
        return 0.5  # without a request
    reply = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "go"}])
    if n == 1:
        raise RuntimeError("broken")
    if n == 2:
        return float("nan")
    if n == 3:
        return None
    if n == 4:
        return "good"
    if n == 5:
        import os, sys
        print("my last words", file=sys.stderr)
        os.kill(os.getpid(), 9)
    if n == 6:
        import time
        time.sleep(100)
    return 1.0

async def crowd(client, row):
    import asyncio, zlib
    import openai
    found = {}

    async def ask(i):
        messages = [{"role": "user", "content": f"{row['n']} {i}"}]
        body = {"model": "m", "messages": messages, "max_tokens": 4 + i % 5}
        kind = i % 5
        if kind == 0:
            reply = await client.chat.completions.create(**body)
            text = reply.choices[0].message.content
            assert reply.usage.completion_tokens <= 4 + i % 5
        elif kind == 1:
            text = ""
            async for chunk in await client.chat.completions.create(**body, stream=True):
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        elif kind == 2:
            try:
                await asyncio.wait_for(client.chat.completions.create(**body), 0.05)
            except (asyncio.TimeoutError, openai.APIError):
                pass
            return
        elif kind == 3:
            for wrong in ({"tool_choice": "required"}, {"n": 0}, {"messages": []}):
                try:
                    await client.chat.completions.create(**{**body, **wrong})
                    assert False
                except openai.BadRequestError:
                    pass
            return
        else:
            again = {"x-stainless-retry-count": "1"}
            first, second = await asyncio.gather(
                client.chat.completions.create(**body),
                client.chat.completions.create(**body, extra_headers=again),
            )
            text = first.choices[0].message.content
        found[f"text_{i}"] = zlib.crc32(text.encode())
    await asyncio.gather(*(ask(i) for i in range(25)))
    return {"reward": 1.0, **found}

def plain(client, row):
    return 1.0
"""
AGENTS = [
    "task.train=rows.jsonl", "task.validation_rows=2", "task.turn_tokens=5", "model=scratch",
    "model.tokenizer=bytes", "model.layers=1", "model.width=32", "model.heads=4", "model.d_ff=48",
    "model.context=128", "rollout.batch=8", "rollout.group_size=4", "train.batch=8",
    "train.steps=2", "device=cpu", "rollout.max_tokens=60", "checkpoint.every=1",
    "validation.every=2", "train.precision=fp32", "engine.precision=fp32", "engine.kv_mb=16",
    "log.rollouts=8", "train.learning_rate=1e-2", "objective.kl=none",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = [{"n": n} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(folder, name, *more, **how):
    how = {"agent": "game.py:play"} | how
    return api.train("keywords", overrides=[*AGENTS, *more], out=folder / name / "run", **how)


def recorded(run):
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]


def test_an_agent_trains_as_the_environment_does(folder):
    """The same game, the same tokens, the same gradients: bit for bit."""
    agent = trained(folder, "a")
    game = trained(folder, "b", agent=None, environment="game.py:Game")
    for one, two in zip(recorded(folder / "a/run"), recorded(folder / "b/run"), strict=True):
        for name in ("tokens", "logprobs", "learner_logprobs", "forced", "reward", "advantage"):
            assert one[name] == two[name], name
    for one, two in zip(agent.metrics, game.metrics, strict=True):
        same = [name for name in one if name.startswith(("train/", "mismatch/", "drift/"))]
        assert {name: one[name] for name in same} == {name: two[name] for name in same}


@pytest.mark.slow
def test_the_agent_of_guess_trains_as_its_environment_does(folder):
    (folder / "games.jsonl").write_text("".join(f'{{"secret": {n}}}\n' for n in range(20)))
    (folder / "held.jsonl").write_text('{"secret": 50}\n{"secret": 60}\n')
    size = [one for one in AGENTS if one.startswith(("model", "train.", "rollout.", "engine."))]
    own = [
        "task.train=games.jsonl",
        "task.validation=held.jsonl",
        "device=cpu",
        "model.context=1024",
    ]
    agent = f"{EXAMPLES}/guess_agent.py:run"
    changed = [*size, *own, "rollout.max_tokens=600", "checkpoint.every=1", "validation.every=2"]
    changed.append("objective.advantage=group_mean")  # the reward of an agent has no turn
    for name, chosen in {"a": agent, "b": None}.items():
        api.train("guess", overrides=changed, agent=chosen, out=folder / name / "run")
    agents, games = recorded(folder / "a/run"), recorded(folder / "b/run")
    assert len(agents) == 16
    for one, two in zip(agents, games, strict=True):
        for name in ("tokens", "logprobs", "learner_logprobs", "reward", "advantage"):
            assert one[name] == two[name], name
    # The recipe's own advantage is one of turns, which an evaluation does not need.
    given = [*own[:3], "rollout.max_tokens=600"]
    measured = api.evaluate("guess", agent=agent, model=folder / "a/run", overrides=given)
    assert len(measured.rows) == 2 * 4
    assert measured.figures["validation/grades_error"] == 0


STALE = ["loop.lag=1", "objective.proximal=behavior"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.extra),
        ["task.live=3", *STALE],
        [*STALE, "buffer.capacity=4", "buffer.max_uses=2", "rollout.max_tokens=32"],
        [*STALE, "selection.dead_groups=active", "selection.on_bound=learn"],
    ],
    ids=["plain", "lag", "buffer", "active"],
)
def test_a_run_repeats_and_resumes_bit_for_bit(folder, more):
    trained(folder, "a", *more)
    trained(folder, "b", *more, stop=stopper(1))
    api.resume(folder / "b/run")
    assert fingerprint(folder / "a/run") == fingerprint(folder / "b/run")


def sampled(agent, *more, count=4, size=2, tokens=100, during=lambda engine: None):
    """Run an agent on the first rows; return the completions, their grades, and the engine."""
    given = [*AGENTS, *more, "model.context=512", f"task.agent=game.py:{agent}", "task.name=agent"]
    resolved = resolve(load_recipe("keywords", given))
    task, engine, _ = local.build_sampler(resolved)
    try:
        numbered = [(i, task.prompt(i)) for i in range(count)]
        params = SamplingParams(max_tokens=tokens, seed=1)
        requests = requests_of(numbered, size, params, 0)
        during(engine)
        found = complete(engine, requests)
        pairs = [(p, c) for (_, p), own in zip(numbered, found, strict=True) for c in own]
        return [(p, c, g) for (p, c), g in zip(pairs, task.grade_all(pairs), strict=True)], engine
    finally:
        task.close()


@pytest.mark.slow
def test_two_conversations_per_episode(folder):
    for pace in ("lockstep", "free"):
        found, engine = sampled("two", f"task.pace={pace}")
        model = engine.engine._model
        for _, completion, grade in found:
            assert not grade.is_error, grade.message
            check_rescored(model, completion)
            assert len(completion.sequences) == len(completion.turns) == 5
            assert grade.parts["requests"] == 3
        assert engine.sampled == sum(int(c.sampled.sum()) for _, c, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["lockstep", "free"])
def test_200_clients_at_once(folder, pace):
    """Streams, cancelled requests, retries and malformed requests of eight episodes: no answer is
    lost or goes to another episode."""
    held = "task.validation=held.jsonl"
    (folder / "held.jsonl").write_text('{"n": 8}\n{"n": 9}\n')
    more = ["task.wall_seconds=200", "task.turns=100", held, f"task.pace={pace}"]
    found, engine = sampled("crowd", *more, count=8, size=1, tokens=5000)
    for prompt, completion, grade in found:
        assert not grade.is_error, grade.message
        ends = [*(one.start for one in completion.sequences[1:]), len(completion.token_ids)]
        assert [turn.start for turn in completion.turns] == [s.start for s in completion.sequences]
        assert [turn.end for turn in completion.turns] == ends
        texts = {}
        for one, turn in zip(completion.sequences, completion.turns, strict=True):
            n, i = one.messages[0]["content"].split()
            assert int(n) == prompt.reference["n"]
            texts.setdefault(f"text_{i}", []).append(zlib.crc32(turn.text.encode()))
        given = {name: value for name, value in grade.parts.items() if name.startswith("text_")}
        assert len(given) == 15
        assert all(value in texts[name] for name, value in given.items())
    assert engine.sampled == sum(int(c.sampled.sum()) for _, c, _ in found)


def test_failures_are_counted_and_never_a_reward(folder):
    (folder / "held.jsonl").write_text('{"n": 8}\n{"n": 9}\n')
    held = "task.validation=held.jsonl"
    found, _ = sampled("fails", "task.wall_seconds=6", held, count=8, size=1)
    said = {prompt.reference["n"]: (grade.message, grade.reward) for prompt, _, grade in found}
    for n, words in enumerate(
        [
            "without an answered request",
            "RuntimeError: broken (game.py",
            "finite number",
            "returned nothing",
            "returned str",
            "the agent's process was lost twice: the agent's process was killed by SIGKILL while "
            "the agent ran; the end of its output:\n  my last words",
            "more than 6 s of its own (task.wall_seconds)",
        ]
    ):
        assert words in said[n][0]
        assert np.isnan(said[n][1])
    assert said[7] == (None, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "supervisor"])
def test_episodes_begin_again_if_their_server_or_supervisor_is_killed(folder, victim):
    killed = []

    def kill_once(engine):
        answer = engine.server.answer

        def killing(*args):
            if len(killed) < 1 and engine.engine.sampled > 20:
                own = {"server": lambda: engine.server.pid}
                own["supervisor"] = lambda: supervisor_of(engine._agents)
                killed.append(own[victim]())
                os.kill(killed[0], signal.SIGKILL)
                time.sleep(0.05)
            return answer(*args)

        engine.server.answer = killing

    calm, _ = sampled("play")
    found, engine = sampled("play", during=kill_once)
    assert len(killed) == 1
    assert engine.server.generation == (2 if victim == "server" else 1)
    assert sum(grade.parts["restarts"] for *_, grade in found) > 0
    for (_, one, a), (_, two, b) in zip(calm, found, strict=True):
        assert not b.is_error, b.message
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert a.reward == b.reward


def test_what_the_plan_says(folder):
    plan = dict(
        make_plan(
            load_recipe("keywords", [*AGENTS, "task.name=agent", "task.agent=game.py:play"]), folder
        )
    )
    lines = dict(plan["task"])
    assert "parallel requests of one episode" in lines["order"]
    assert "never 0" in lines["reward"]


def test_a_wrong_agent_is_an_error_before_the_run(folder):
    with pytest.raises(DataError, match="must be a function 'async def plain"):
        trained(folder, "a", agent="game.py:plain")
    with pytest.raises(ConfigError, match="give one of them"):
        trained(folder, "a", environment="game.py:Game")
    with pytest.raises(ConfigError, match="give one of them"):
        api.evaluation_recipe("demo-small", None, [], "game.py:Game", "game.py:play")
    with pytest.raises(ConfigError, match="returns the reward itself"):
        trained(folder, "a", reward="game.py:reward")


def test_too_many_failures_end_the_run(folder):
    with pytest.raises(GraderError, match="responses got no grade"):
        trained(folder, "a", "task.wall_seconds=6", agent="game.py:fails")
