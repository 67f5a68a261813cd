import dataclasses
import sys
from contextlib import closing

import pytest

from burnish.errors import ConfigError, DataError, MissingExtra
from burnish.graders.pool import GraderLimits, GraderPool
from burnish.recipe.tasks import GymTask
from burnish.rollout.packing import pack
from burnish.tasks.gym import SCORER, make_gym
from burnish.types import Finish, Status
from tests.conftest import byte_tokenizer, make_group

SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
GROUP = make_group(0, [1], [[1]], [0])
(BASE,) = GROUP.completions


@pytest.fixture(autouse=True)
def installed(request):
    if "without" not in request.node.name:
        pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")


@pytest.fixture(scope="module")
def scorers():
    """Workers that several tests share: they take seconds to load, and know every generator."""
    with closing(GraderPool(SCORER, GraderLimits(workers=1, cpu_seconds=0.5))) as pool:
        yield pool


def make(generator="chain_sum", seed=0, scorers=None, **more):
    config = GymTask(generator=generator, workers=1, **{"validation_prompts": 20} | more)
    task = make_gym(config, tokenizer=byte_tokenizer(), seed=seed)
    if scorers is not None:
        task.grader = scorers
    return task


def completion(text, finish=Finish.STOP):
    return dataclasses.replace(BASE, text=text, finish=finish)


def tagged(answer):
    return completion(f"well </think> <answer>{answer}</answer>")


def grades(task, prompt, *answers):
    return task.grade_all([(prompt, tagged(answer)) for answer in answers])


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(MissingExtra, match=r"chain_sum needs .* pip install 'burnish\[gym\]'"):
        make()


def test_prompts_come_from_the_seed_and_are_never_held_out():
    task = make(settings=SUMS, validation_prompts=150)
    held_out = {p.reference["entry"]["question"] for p in task.validation}
    drawn = [task.prompt(i).reference["entry"]["question"] for i in range(300)]
    assert len(held_out) == 150
    assert not held_out & set(drawn)
    assert len(set(drawn)) > 200
    again, other = make(settings=SUMS), make(settings=SUMS, seed=1)
    assert [make(settings=SUMS, validation_prompts=150).prompt(i).text for i in (7, 3)] == [
        task.prompt(i).text for i in (7, 3)
    ]
    assert [p.text for p in again.validation] == [p.text for p in other.validation]
    first = {other.prompt(i).text for i in range(30)}
    assert len(first & {again.prompt(i).text for i in range(30)}) < 15  # not shifted by one
    assert task.prompt(0).text.endswith(f"User: {drawn[0]}\nAssistant: <think>")
    assert task.prompt(5).prompt_id == "gym/train/5"


def test_too_few_questions():
    tiny = SUMS | {"max_terms": 2}  # 200 of them
    assert make(settings=tiny, validation_prompts=120).prompt(0)
    with pytest.raises(
        DataError, match=r"of chain_sum that its settings allow are 200; task.valid"
    ):
        make(settings=tiny, validation_prompts=201)
    with pytest.raises(DataError, match=r"allow are held out; task.validation_prompts = 200 must"):
        make(settings=tiny, validation_prompts=200).prompt(0)


@pytest.mark.parametrize(
    ("generator", "settings", "message"),
    [
        ("chain_sums", {}, "= 'chain_sums' and .* do not suit .*: .* not registered"),
        ("chain_sum", {"min_term": 2}, "do not suit .* unexpected .* 'min_term'"),
        ("chain_sum", {"seed": 2}, "do not suit .* multiple values .* 'seed'"),
        (
            "chain_sum",
            {"min_terms": 9},
            "suit reasoning-gym: max_terms must be >= min_terms",
        ),
    ],
)
def test_settings_that_are_wrong(generator, settings, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make(generator, settings=settings)


@pytest.mark.parametrize("generator", ["chain_sum", "basic_arithmetic", "gsm_symbolic"])
def test_own_scorers(generator, scorers):
    task = make(generator, validation_prompts=3, scorers=scorers)
    prompt = task.validation[0]
    right, wrong, *none = task.grade_all(
        [
            (prompt, tagged(prompt.reference["entry"]["answer"])),
            (prompt, tagged("123456789")),
            (prompt, completion("no answer")),
        ]
    )
    assert (right.reward, right.parts) == (1, {"format": 1, "answer": 1, "ended": 1})
    assert wrong.reward < 0.1
    assert wrong.parts == {"format": 1, "answer": 0, "ended": 1}
    assert (none[0].reward, none[0].status) == (0, Status.UNPARSED)
    assert task.answer(prompt, tagged("7").text) == "7"
    assert task.answer(prompt, "no answer") is None


@pytest.mark.parametrize("generator", ["n_queens", "spiral_matrix"])
def test_scorers_that_evaluate_do_not(generator, scorers, tmp_path):
    task = make(generator, validation_prompts=1, scorers=scorers)
    (prompt,) = task.validation
    answer = prompt.reference["entry"]["answer"]
    as_list = str([row.split() for row in answer.split("\n")])
    spelled = as_list if generator == "n_queens" else str(answer.split())
    mark = tmp_path / "mark"
    code = f"[__import__('pathlib').Path({str(mark)!r}).touch()]"
    right, listed, hostile = grades(task, prompt, answer, spelled, code)
    assert right.reward == 1
    assert listed.reward > 0  # what their eval was for still works
    assert hostile.reward < 0.1
    assert not mark.exists()


@pytest.mark.parametrize("generator", ["countdown", "polynomial_multiplication"])
def test_a_scorer_that_would_have_to_evaluate_is_an_error(generator, scorers):
    task = make(generator, validation_prompts=1, scorers=scorers)
    (prompt,) = task.validation
    (grade,) = grades(task, prompt, prompt.reference["entry"]["answer"])
    assert grade.status is Status.ERROR
    assert "choose another task.generator" in grade.message


def test_a_score_that_takes_too_long_has_the_parts_of_every_other(scorers):
    """A recipe's gdpo normalises each part over a group, and stops at a grade that lacks one."""
    task = make("rubiks_cube", validation_prompts=1, scorers=scorers)
    (prompt,) = task.validation
    found = task.grade_all([(prompt, tagged(moves)) for moves in ("R L", "R L " * 500_000)])
    assert [grade.status for grade in found] == [Status.SCORED, Status.TIMEOUT]
    assert found[1].parts == {"format": 1.0, "answer": 0.0, "ended": 1.0}
    completions = tuple(dataclasses.replace(BASE, sample_index=i) for i in range(2))
    group = dataclasses.replace(GROUP, completions=completions, grades=tuple(found))
    assert pack([group], ("format", "answer")).parts.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_the_scorers_module_is_the_packages_own():
    assert SCORER.module == "burnish.graders.gym"
    assert SCORER.spec.endswith("graders/gym.py:gym_reward")
