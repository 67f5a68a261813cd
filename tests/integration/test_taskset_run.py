"""Runs on tasksets of the package verifiers: what is learned was sampled, and what is not."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from burnish import api
from burnish.environments import taskset
from burnish.errors import ConfigError, DataError, GraderError, MissingExtra
from burnish.launch import local
from burnish.launch.preflight import check_rows, check_task_extras
from burnish.launch.resolve import resolve
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.rollout.rollout import complete, requests_of
from burnish.types import SamplingParams
from tests.loops.test_recorder import fingerprint, stopper
from tests.rollout.scripted_agents import check_rescored

FOLDER = Path(__file__).parents[1] / "tasksets"
LETTERS = [
    "task.name=verifiers", f"task.taskset={FOLDER}/letters.py", "task.validation_rows=2",
    "task.turn_tokens=6", "model=scratch", "model.tokenizer=bytes", "model.layers=1",
    "model.width=32", "model.heads=4", "model.d_ff=48", "model.context=128", "rollout.batch=8",
    "rollout.group_size=4", "train.batch=8", "device=cpu", "rollout.max_tokens=60",
    "validation.every=10", "train.precision=fp32", "engine.precision=fp32", "engine.kv_mb=16",
    "log.rollouts=8", "train.learning_rate=1e-2", "objective.kl=none", "train.steps=2",
]  # fmt: skip
needs_verifiers = pytest.mark.skipif(
    not taskset.has_verifiers(), reason="the extra 'verifiers' is not installed"
)


def recorded(run):
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]


@needs_verifiers
@pytest.mark.slow
def test_a_taskset_trains_for_ten_steps(tmp_path):
    """Each answer of both turns is learned with the probability that it was sampled with, and the
    reward of a trace is that of its episode."""
    wide = ["task.env.taskset.width=48", "rollout.batch=32", "train.batch=32", "train.steps=10"]
    wide += ["train.learning_rate=3e-2"]
    run = api.train("keywords", overrides=[*LETTERS, *wide], out=tmp_path / "run")
    steps = run.metrics[1:]
    assert len(steps) == 10
    for step in steps:
        assert step["rollout/grades_error"] == 0
        assert step["mismatch/logprob_mean"] < 1e-5
        assert step["mismatch/logprob_max"] < 1e-4
    rewards = [step["rollout/reward"] for step in steps]
    assert rewards[-1] > 1.5 * rewards[0]
    rows = recorded(run)
    assert rows
    for row in rows:
        first = ord(row["asked"].removeprefix("Write ")[0])
        said = "".join(turn["text"] for turn in row["turns"])
        share = sum(first <= ord(char) < first + 48 for char in said) / max(1, len(said))
        assert (len(row["turns"]), row["status"]) == (2, "scored")
        assert row["reward"] == pytest.approx(share)
        assert row["turns"][0]["messages"] == [{"role": "user", "content": "Again."}]


def sampled(name, *more, count=4, size=2):
    """Play tasks without training; return the prompts, completions and grades, and the engine."""
    given = [*LETTERS, f"task.taskset={FOLDER}/{name}.py", *more]
    resolved = resolve(load_recipe("keywords", given))
    task, engine, _ = local.build_sampler(resolved)
    try:
        numbered = [(i, task.prompt(i)) for i in range(count)]
        requests = requests_of(numbered, size, SamplingParams(max_tokens=100, seed=1), 0)
        found = complete(engine, requests)
        pairs = [(p, c) for (_, p), own in zip(numbered, found, strict=True) for c in own]
        return [(p, c, g) for (p, c), g in zip(pairs, task.grade_all(pairs), strict=True)], engine
    finally:
        task.close()


@needs_verifiers
@pytest.mark.parametrize("pace", ["lockstep", "free"])
def test_sequences_of_the_role_that_learns_have_the_learners_log_probabilities(pace):
    """The critic's answers are sampled and not learned; they are in no sequence."""
    found, engine = sampled("panel", f"task.pace={pace}")
    kept = 0
    for _, completion, grade in found:
        assert not grade.is_error, grade.message
        check_rescored(engine.engine._model, completion)
        assert len(completion.turns) == 2
        assert grade.parts["requests"] == 4
        kept += int(completion.sampled.sum())
    assert kept < engine.sampled < 3 * kept


@needs_verifiers
def test_a_role_is_chosen_by_the_recipe():
    frozen = "task.env.frozen=false"
    found, _ = sampled("panel", frozen, "task.role=critic", count=2)
    assert [grade.is_error for _, _, grade in found] == [False] * 4
    found, _ = sampled("panel", frozen, count=1, size=1)
    assert "got 2 (solver, critic); set task.role" in found[0][2].message


@needs_verifiers
def test_episodes_that_fail_are_counted_and_never_a_reward():
    late = "task.env.agent.timeout.scoring=0.5"
    found, _ = sampled("faults", "task.validation_rows=1", late, count=len(FAULTS) - 1, size=1)
    said = {p.reference["prompt"].removeprefix("fault: "): g for p, _, g in found}
    assert len(said) == len(FAULTS) - 1
    for name, grade in said.items():
        assert grade.is_error == bool(FAULTS[name]), name
        assert FAULTS[name] in (grade.message or "")
        assert grade.is_error or grade.reward == 0.5


FAULTS = {
    "raises": "TaskError: task Task scoring: KeyError: 'gold'",
    "late": "the reward points was not computed (scoring_timeout)",
    "not_a_number": "the reward points must be finite, got nan",
    "none": "the trace has no reward",
    "setup": "TaskError: task setup: RuntimeError: no disk",
    "model": "",
    "good": "",
}


@needs_verifiers
def test_a_run_resumes_bit_for_bit(tmp_path):
    small = [*LETTERS, "checkpoint.every=1", "validation.every=2"]
    api.train("keywords", overrides=small, out=tmp_path / "a/run")
    api.train("keywords", overrides=small, out=tmp_path / "b/run", stop=stopper(1))
    api.resume(tmp_path / "b/run")
    assert fingerprint(tmp_path / "a/run") == fingerprint(tmp_path / "b/run")


@needs_verifiers
def test_a_run_whose_episodes_fail_ends_with_their_error(tmp_path):
    more = [f"task.taskset={FOLDER}/faults.py", "task.tasks=2", "task.validation_rows=1"]
    more.append("task.env.agent.timeout.scoring=0.5")
    with pytest.raises(GraderError, match=r"KeyError: 'gold'|scoring_timeout"):
        api.train("keywords", overrides=[*LETTERS, *more], out=tmp_path / "run")


@needs_verifiers
def test_a_taskset_is_checked_before_the_model_is_loaded():
    recipe = load_recipe("keywords", [*LETTERS, f"task.taskset={FOLDER}/outdated.py"])
    with pytest.raises(DataError, match=r"for verifiers before 0\.4"):
        check_rows(recipe.tasks, 0, 0.1)


def test_the_extra_is_named_if_it_is_missing(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(taskset, "version", version)
    with pytest.raises(MissingExtra, match=r"burnish\[verifiers\]"):
        check_task_extras(load_recipe("keywords", LETTERS).tasks)


@pytest.mark.parametrize(
    "setting", ["task.train=rows.jsonl", "task.validation=rows.jsonl", "task.system=Be kind."]
)
def test_settings_that_a_taskset_does_not_read_are_refused(setting):
    with pytest.raises(ConfigError, match=f"{setting.partition('=')[0]}.*no effect"):
        load_recipe("keywords", [*LETTERS, setting])


def test_the_plan_says_what_an_episode_is():
    plan = make_plan(load_recipe("keywords", LETTERS), Path("runs/x"))
    lines = dict(line for _, section in plan for line in section)
    assert "letters.py" in lines["task"]
    assert "never 0" in lines["reward"]
