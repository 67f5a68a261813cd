"""The task of episodes: its prompts and grades, with real environments."""

import json
import math

import pytest

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.tasks import EnvironmentTask
from burnish.tasks.environment import make_environment, try_environment
from burnish.tasks.rows import DataRow
from burnish.types import Finish, Status, Turn
from tests.conftest import make_group

GAME = """
class Game:
    deterministic = True

    def reset(self, row, seed):
        if row["n"] == 3:
            raise RuntimeError("no game 3")
        return [{"role": "system", "content": "play"}, {"role": "user", "content": f"{row['n']}"}]

    def step(self, message):
        return {"messages": "more", "reward": 1.0}


class Drawn(Game):
    def reset(self, row, seed):
        return f"seed {seed}"
"""
ROWS = [{"n": n, "prompt": "the row's own"} for n in (0, 1, 2, 4, 5)]


@pytest.fixture
def make(tmp_path):
    made = []

    def open_task(rows=ROWS, name="Game", seed=0, **settings):
        (tmp_path / "game.py").write_text(GAME)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = EnvironmentTask(
            environment=f"{tmp_path}/game.py:{name}",
            train=f"{tmp_path}/rows.jsonl",
            **{"validation_rows": 2, **settings},
        )
        made.append(make_environment(config, tokenizer=Tokenizer.of_bytes(), seed=seed))
        return made[-1]

    yield open_task
    for task in made:
        task.close()


def test_prompts_are_the_first_messages(make):
    task = make()
    prompts = [*(task.prompt(number) for number in range(3)), *task.validation]
    assert sorted(prompt.reference["n"] for prompt in prompts) == [0, 1, 2, 4, 5]
    for prompt in prompts:
        number = prompt.reference["n"]
        assert prompt.reference == {"n": number, "prompt": "the row's own"}
        assert prompt.text == f"play\n{number}\n"
        assert prompt.token_ids.tolist() == Tokenizer.of_bytes().encode(prompt.text).tolist()
        assert prompt.episode.row == prompt.reference
        assert [message["role"] for message in prompt.episode.messages] == ["system", "user"]
    assert task.prompt(1).episode == task.prompt(1).episode


def test_seeds_follow_the_number_and_held_out_ones_are_the_same_for_every_run(make):
    first, other = make(name="Drawn"), make(name="Drawn", seed=1, validation=None)
    seeds = [first.prompt(number).episode.seed for number in range(6)]
    assert len(set(seeds)) == 6
    assert first.prompt(0).text == f"seed {seeds[0]}\n"
    assert [first.prompt(number).episode.seed for number in range(6)] == seeds
    assert seeds[0] != other.prompt(0).episode.seed
    assert [p.episode.seed for p in first.validation] == [p.episode.seed for p in other.validation]


def turn(reward=None, error=None, text="t", **metrics):
    messages = ({"role": "user", "content": "more"},)
    return Turn(0, 1, text, messages, reward, metrics, error)


def graded(task, *turns, finish=Finish.STOP):
    group = make_group(0, [1], [[2]], [0.0])
    (completion,) = group.completions
    completion = type(completion)(**{**vars(completion), "turns": turns, "finish": finish})
    return task.grade_all([(task.prompt(0), completion)])[0]


def test_rewards_of_turns_are_added(make):
    task = make()
    grade = graded(task, turn(0.5, guesses=1.0), turn(None, other=3.0), turn(-1.0, guesses=2.0))
    assert (grade.reward, grade.status, grade.correct) == (-0.5, Status.SCORED, None)
    assert grade.parts == {"guesses": 2.0, "other": 3.0}


def test_an_environment_says_what_is_correct(make):
    task = make()
    assert graded(task, turn(0.1, correct=0.0), turn(0.1, correct=1.0)).correct is True
    assert graded(task, turn(0.1, correct=0.0), turn(2.0)).correct is False
    assert graded(task, turn(correct=0.0), finish=Finish.LENGTH).correct is False


def test_failures_are_errors_and_never_zero(make):
    task = make()
    for turns, said in (
        ((turn(1.0), turn(error="step: took more than 20 s")), "took more than 20 s"),
        (
            (turn(),),
            "gave no reward; return a reward from step, or set task.reward to a function that "
            "grades the last message, or, with a reward model, task.reward = 'none'",
        ),
    ):
        grade = graded(task, *turns)
        assert (math.isnan(grade.reward), grade.status) == (True, Status.ERROR)
        assert said in grade.message
    assert graded(task, turn(), finish=Finish.LENGTH).reward == 0.0


def test_a_reward_grades_the_last_turn_with_all_messages(make, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def score(response, row):\n"
        "    roles = ''.join(m['role'][0] for m in row['messages'])\n"
        "    return {'reward': float(response == 'b'), 'n': row['n'], 'ok': roles == 'suauau'}\n"
    )
    task = make(reward=f"{tmp_path}/reward.py:score")
    grade = graded(task, turn(text="a"), turn(text="b"))
    assert (grade.reward, grade.correct) == (1.0, True)
    assert grade.parts == {"n": task.prompt(0).reference["n"], "ok": 1.0}
    assert graded(task, turn(0.25, text="b")).reward == 0.25  # the environment's own comes first


def test_without_any_reward_a_reward_model_grades_alone(make):
    task = make(reward="none")
    grade = graded(task, turn(text="a"))
    assert (grade.reward, grade.status, grade.correct) == (0.0, Status.SCORED, None)


def test_a_judge_beside_the_environments_own_rewards_is_refused(make):
    """One of the two would be ignored."""
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "tries": 1, "seconds": 1}
    task = make(judge=judge, rubric=[["It is polite.", 1.0]])
    told = r"^task\.judge grades the last message .*game\.py:Game gave an episode the reward 0\.5 "
    told += r"itself.*; return no reward from step, or remove task\.judge and task\.rubric$"
    with pytest.raises(DataError, match=told):
        graded(task, turn(0.5), turn())
    assert "the judge" in graded(task, turn(), turn()).message  # nobody answers there


def test_environments_that_fail_to_start(make, tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl, line \d: .*Game: .*no game 3"):
        make(rows=[{"n": 3}, {"n": 3, "other": 1}, {"n": 3, "other": 2}])
    (tmp_path / "held_out.jsonl").write_text('{"n": 9}\n')
    task = make(rows=[{"n": 3}], validation=f"{tmp_path}/held_out.jsonl", validation_rows=None)
    prompt = task.prompt(0)  # it is counted as an error when its episodes fail as well
    assert (prompt.episode.messages, len(prompt.token_ids)) == ((), 1)
    config = EnvironmentTask(environment=f"{tmp_path}/game.py:Game", train="unused")
    with pytest.raises(DataError, match=r"row 1: .*no game 3"):
        try_environment(config, DataRow({"row": {"n": 3}}, "row 1"))
    try_environment(config, DataRow({"row": {"n": 1}}, "row 1"))
