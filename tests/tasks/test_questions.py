"""The rows of the recipes calculator and search, and the rewards of their answers."""

import json
from itertools import islice

import pytest

from burnish import api
from burnish.cli.data import DATA_MAKERS, make_calculator, make_search, write_data
from burnish.errors import ConfigError, DataError
from burnish.graders.questions import citations, number
from burnish.graders.rewards import BUILT_IN
from burnish.recipe.load import load_recipe
from burnish.tasks.environment import load_starts
from burnish.tasks.lookups import KINDS, LookupWorld
from burnish.tasks.products import product_conversations, product_questions, worked_product
from tests.endpoint import endpoint
from tests.integration.test_tool_run import SCRATCH
from tests.tasks.test_judged import letters


def test_products():
    train = list(islice(product_questions(0, held_out=False), 3000))
    other = list(islice(product_questions(1, held_out=True), 300))
    numbers = [{n for row in rows for n in (row["a"], row["b"])} for rows in (train, other)]
    assert numbers[0].isdisjoint(numbers[1])
    assert train == list(islice(product_questions(0, held_out=False), 3000))
    assert len({row["prompt"] for row in train}) > 2900
    for row in train[:50]:
        assert number(worked_product(row["a"], row["b"]), row)["reward"] == 1
    assert worked_product(437, 862) == (
        "437*862 = 437*800 + 437*60 + 437*2 = 349600 + 26220 + 874 = 376694"
    )
    assert worked_product(437, 800) == "437*800 = 349600"
    talks = list(islice(product_conversations(0, held_out=False), 9))
    called = [any(m.get("tool_calls") for m in row["messages"]) for row in talks]
    assert called == [True, False, False] * 3
    assert [bool(row["tools"]) for row in talks] == [True, True, False] * 3
    assert [row["messages"][-1]["content"].split("= ")[-1] for row in talks] == [
        row["answer"] for row in islice(product_questions(0, held_out=False), 9)
    ]


@pytest.mark.parametrize(
    ("text", "reward"),
    [("12 * 3 = 36", 1), ("= 1,036", 0), ("It is 1,036.", 0), ("36", 1), ("36 or 37", 0), ("", 0)],
)
def test_the_last_number_is_the_answer(text, reward):
    assert number(text, {"answer": "36"}) == {"reward": reward}
    assert number("1,036", {"answer": 1036}) == {"reward": 1}


def test_documents_need_two_look_ups():
    world = LookupWorld(3)
    assert world.documents == LookupWorld(3).documents != LookupWorld(4).documents
    assert len(world.documents) == 450
    files = [{f for row in world.questions(held_out=h) for f in row["cites"]} for h in (0, 1)]
    assert files[0].isdisjoint(files[1])
    assert {*files[0], *files[1]} == {*world.documents}
    for row in world.questions(held_out=True):
        person, company = (world.documents[name] for name in row["cites"])
        assert row["answer"] in company
        assert company.split(" was founded")[0] in person
    found = 0
    for row, talk in zip(
        world.questions(held_out=False), world.conversations(held_out=False), strict=True
    ):
        results = [m["content"] for m in talk["messages"] if m["role"] == "tool"]
        for result, name in zip(results, row["cites"], strict=False):
            assert name in result  # the demonstrated search finds the document
        graded = citations(
            talk["messages"][-1]["content"], {**row, "messages": talk["messages"][:-1]}
        )
        found += graded["correct"]
        assert 0 <= graded["reward"] <= 1
    assert found == len(list(world.questions(held_out=False))) / 3  # two of six ways are right
    assert {row["kind"] for row in world.questions(held_out=True)} == {*KINDS}


ROW = {"answer": "1874", "cites": ["a.md", "b.md"]}
READ = [{"role": "user", "content": "see [c.md]?"}, {"role": "tool", "content": "[1] a.md b.md"}]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1874 [a.md] [b.md]", 1),
        ("1874. [b.md][a.md]", 1),
        ("1874 [a.md]", 3 / 4),
        ("1874", 1 / 2),
        ("1875 [a.md] [b.md]", 1 / 2),
        ("1874 1875 [a.md] [b.md]", 1 / 2),
        ("1874 [a.md] [b.md] [c.md]", 3 / 4),
        ("[c.md]", -1 / 4),
        ("", 0),
    ],
)
def test_citations_are_graded_by_a_rubric(text, reward):
    graded = citations(text, {**ROW, "messages": READ})
    assert graded["reward"] == reward
    assert graded["correct"] == (reward == 1)
    unread = citations(text, {**ROW, "messages": READ[:1]})
    assert unread["cited_1"] == unread["cited_2"] == 0  # guessed names of documents
    assert {"number", "citations"} <= BUILT_IN.keys()


def test_rows_and_documents_are_written(tmp_path):
    assert write_data("search", tmp_path / "search", {"seed": 2}).startswith("burnish sft search")
    files = make_search(seed=2)
    for name, content in files.items():
        if isinstance(content, str):
            assert (tmp_path / "search" / name).read_text() == content
        else:
            lines = (tmp_path / "search" / f"{name}.jsonl").read_text().splitlines()
            assert [json.loads(line) for line in lines] == content
    assert [*files["held_out"][0]] == [
        "prompt", "answer", "cites", "rubric", "kind", "person",
    ]  # fmt: skip
    assert make_calculator(rows=9, seed=1) == make_calculator(rows=9, seed=1)
    assert len(make_calculator(rows=9)["train"]) == 9
    assert {"calculator", "search"} <= DATA_MAKERS.keys()


JUDGED = [
    "task.name=environment", "task.tools=['calculator']", "task.train=rows.jsonl",
    "task.validation_rows=2", "task.turn_tokens=16", "task.turns=2", "rollout.batch=8",
    "rollout.group_size=4", "train.batch=8", "train.steps=2", "rollout.max_tokens=40",
    "engine.precision=fp32", "engine.kv_mb=16", "train.learning_rate=1e-3", "task.judge.model=m",
    "task.rubric=[['Has the letter e.', 2], ['Has the letter z.', -1]]",
]  # fmt: skip


@pytest.mark.slow
def test_a_judge_grades_episodes_by_their_rubrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"what is {n}?"} for n in range(8)]
    rows[0]["rubric"] = [["Has the letter t.", 1]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with endpoint(letters) as (url, requests):
        more = [f"task.judge.url={url}", "task.evolve.most=2"]
        run = api.train("keywords", overrides=[*SCRATCH, *JUDGED, *more], out="run", show=False)
    for row in run.rollouts:
        said, parts = row["turns"][-1]["text"], row["parts"]
        if "criterion_2" not in parts:  # the row's own rubric
            assert parts["criterion_1"] == ("t" in said)
            continue
        assert parts["criterion_1"] == ("e" in said)
        if "evolved_1" not in parts:
            assert row["reward"] == (2 * parts["criterion_1"] - parts["criterion_2"]) / 2
    assert any("what is 3?" in json.dumps(request) for request in requests)
    assert (tmp_path / "run" / "rubrics.jsonl").exists()


def test_a_judge_needs_a_rubric_and_no_other_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(4)))
    judged = [*SCRATCH, *JUDGED, "task.judge.url=http://127.0.0.1:1/v1"]
    load_recipe("keywords", judged)
    own = load_recipe("search", ["task.judge.url=http://127.0.0.1:1/v1", "task.judge.model=m"])
    assert own.task.reward is None  # the judge takes its place
    with pytest.raises(ConfigError, match="has a reward and a judge"):
        load_recipe("keywords", [*judged, "task.reward=number"])
    with pytest.raises(ConfigError, match="has a rubric and no judge"):
        load_recipe("keywords", [*SCRATCH, *JUDGED[:-2], "task.reward=number", JUDGED[-1]])
    bare = load_recipe("keywords", [s for s in judged if not s.startswith("task.rubric")])
    with pytest.raises(DataError, match=r"no field 'rubric'"):
        load_starts(bare.task, 0)
