"""The report: its data by hand, then the page in a real browser."""

import json
import re
import time
from itertools import pairwise

import pytest

from burnish.console.progress import Progress
from burnish.errors import RunError
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.runs import checkpoints, report, responses
from burnish.runs.directory import RunDirectory, to_jsonl
from burnish.runs.ledger import Ledger
from burnish.runs.report import write_report

RECIPE = recipe_to_toml(load_recipe("sort"))
NOW = 1_000_000.0
SAMPLING = Progress(
    "generate",
    "sampling 64 responses",
    done=1234,
    total=4096,
    unit="tokens",
    tokens_per_second=210.4,
    step=3,
    steps=14,
    seconds_left=512.0,
)
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '<img src="x" onerror="window.hacked = 2">',
    "<!--<script>",
    "a\u2028b\u2029c\x00\x07\x1b[31m\r\n\t",
    "left \u202e right \u2066\u200f",
    "👩‍👩‍👧 日本語 \ud800",
    "'\"`${window.hacked = 3}&lt;",
)


def rollout(step, sample=0, *, prompt="say it", tokens=("a", " b"), **changes):
    return {
        "step": step,
        "group": step,
        "prompt_id": prompt,
        "prompt": prompt,
        "asked": prompt,
        "sample": sample,
        "response": "".join(tokens),
        "tokens": list(tokens),
        "logprobs": [-0.5 * (k + 1) for k in range(len(tokens))],
        "learner_logprobs": [-0.5 * (k + 1) + 0.01 for k in range(len(tokens))],
        "reward": step / 10,
        "parts": {"inclusion": 1.0},
        "status": "scored",
        "advantage": 0.5,
        "finish": "stop",
        "version": step,
    } | changes


def make_run(path, steps=12, *, rollouts=(), evaluations=(), finished=True):
    with RunDirectory(path, RECIPE) as run:
        for step in range(steps):
            metrics = {
                "step": step,
                "rollout/reward": step / 10,
                "rollout/responses": 30,
                "train/entropy": 2.0 - step / 10,
                "train/loss": float("nan") if step == 3 else 0.1,
                "kl/initial_k1": 0.01 * step,
                "kl/initial_k3": 0.1 * step,
                "rollout/ended": 0.5 + 0.01 * step,
                "validation/ended": 0.9,
                "kl/initial_k3_response": 0.2 * step,
                "kl/previous_k3": 0.01,
                "kl/previous_k3_response": 0.2,
                "kl/reference_k3": 0.02,
                "mismatch/logprob_mean": 1e-6,
                "mismatch/logprob_max": 1e-4,
                "custom/thing": 1.0,
            }
            if step % 3 == 0:
                metrics["validation/reward"] = step / 10
            run.append_row("metrics.jsonl", metrics)
            times = {"time/generate": 2.0, "time/learn": 1.0, "time/other": 0.0, "time/step": 3.0}
            run.append_row("timings.jsonl", {"step": step} | times)
        for name, rows in (("rollouts.jsonl", rollouts), ("evaluations.jsonl", evaluations)):
            for row in rows:
                run.append_row(name, row)
        if finished:
            run.write("summary.json", "{}")
    return path


def data_of(page):
    text = page.read_text(encoding="utf-8")
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(block)


def test_the_data_of_a_page(tmp_path):
    data = data_of(write_report(make_run(tmp_path)))
    assert (data["name"], data["seed"]) == ("sort", 0)
    assert data["state"]["kind"] == "finished"
    assert data["state"]["text"] == "finished, 11 of 100 steps"
    assert data["series"]["validation/reward"] == {
        "points": [[0, 0], [3, 0.3], [6, 0.6], [9, 0.9]],
        "count": 4,
        "sum": pytest.approx(1.8),
        "window": 1,
        "ends": [0, 0.9],
    }
    assert len(data["series"]["train/loss"]["points"]) == 11  # one was not finite
    assert data["series"]["rollout/reward"]["ends"] == [0.15, 0.95]  # four steps each
    assert data["clocks"]["time/generate"]["sum"] == 24
    assert data["reading"][0].startswith(
        "KL to the initial model, averaged over neighbouring steps, went from 0 to 0.11 nats per"
    )


def test_the_state_is_told_from_the_files(tmp_path):
    with RunDirectory(tmp_path / "run", RECIPE) as run:
        report.write_status(run.path, "running", Progress("load", ""), now=time.time())
        data = data_of(write_report(run.path))
        assert data["state"]["text"] == "running, 0 of 100 steps"
        assert data["series"] == {}
        run.append("metrics.jsonl", '{"step": 1, "train/loss": 1}\n{"step": 2, "tr')
    import torch

    report.write_status(run.path, "stopped", Progress("load", ""), now=time.time())
    checkpoints.save_checkpoint(run.path, 1, {"a": torch.zeros(1)}, {})
    state = data_of(write_report(run.path))["state"]
    assert state["kind"] == "stopped"
    assert state["text"] == "stopped early, 1 of 100 steps; resumes from step-00000001"
    with pytest.raises(RunError, match="not a run directory"):
        write_report(tmp_path)


def test_long_runs_are_thinned_as_metrics_are_combined():
    points = [(float(step), float(step)) for step in range(1000)]
    assert report.thin("a", points)[:2] == [(2.0, 1.0), (5.0, 4.0)]
    assert report.thin("a_max", points)[:2] == [(2.0, 2.0), (5.0, 5.0)]
    assert len(report.thin("a", points)) <= report.POINTS
    assert report.thin("a", []) == []


def test_what_a_model_wrote_cannot_leave_its_data(tmp_path):
    rows = [rollout(0, prompt=text, tokens=(text, text)) for text in HOSTILE]
    page = write_report(make_run(tmp_path, rollouts=rows))
    text = page.read_text(encoding="utf-8")
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert "<img" not in text
    assert not re.search("[\u2028\u2029\u202e\x00\x1b]", text)
    data = data_of(page)
    assert [row["tokens"] for row in data["rollouts"]["rows"]] == [[t, t] for t in HOSTILE]
    assert [row["asked"] for row in data["rollouts"]["rows"]] == list(HOSTILE)


def test_the_file_is_bounded_and_says_what_it_shows(tmp_path):
    long = ["word " * 10, "<&>" * 10] * 20
    rows = [
        rollout(step, sample, prompt=f"p{step}-{sample % 2}", tokens=long)
        for step in range(40)
        for sample in range(8)
    ]
    evaluations = [
        rollout(step, prompt=f"v{k}", tokens=long) for step in (0, 39) for k in range(10)
    ]
    run = make_run(tmp_path, rollouts=rows, evaluations=evaluations)
    assert len(data_of(write_report(run))["rollouts"]["rows"]) == 340
    limit = 250_000
    told = data_of(write_report(run, limit=limit))["rollouts"]
    assert limit * 0.95 < len(json.dumps(told)) <= limit * 1.05
    assert told["total"] == 340
    assert 20 < len(told["rows"]) < 340
    assert len(told["pairs"]) == 10  # they come first
    for a, b in told["pairs"]:
        before, after = told["rows"][a], told["rows"][b]
        assert before["asked"] == after["asked"]
        assert (before["step"], after["step"]) == (0, 39)
    steps = [row["step"] for row in told["rows"] if not row["source"]]
    assert max(b - a for a, b in pairwise(steps)) <= 8  # of the whole run
    assert steps.count(39) == 8  # the newest step is whole


def test_one_huge_response_is_cut_and_says_so(tmp_path):
    many = rollout(1, tokens=["yes "] * 50_000)
    stopped = many | {"sample": 1, "response": "yes " * 49_999}
    page = write_report(make_run(tmp_path, rollouts=[many, stopped]))
    assert page.stat().st_size < 300_000
    first, second = data_of(page)["rollouts"]["rows"]
    assert (len(first["tokens"]), first["whole"]) == (responses.TOKENS, [50_000, 200_000])
    assert "response" not in first
    assert second["response"] == "yes " * responses.TOKENS


def test_a_prompt_is_what_was_asked_and_is_never_cut(tmp_path):
    long = "How much is it? " * 2_000 + "End of the question."
    templated = f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n"
    rows = [rollout(s, 0, prompt=templated) | {"asked": long} for s in (0, 1)]
    huge = rollout(2, 1, prompt="x" * 5_000_000)  # has no room in the page; the others do
    page = write_report(make_run(tmp_path, rollouts=[huge, *rows]))
    told = data_of(page)["rollouts"]
    assert {row["asked"] for row in told["rows"]} == {long}
    assert (told["total"], len(told["rows"])) == (3, 2)


def test_pairs_fall_back_to_training_prompts_seen_twice(tmp_path):
    rows = [rollout(s, k, prompt="p") for s in (1, 5, 9) for k in (0, 1)]
    once = [rollout(0, prompt="v")]  # validated once: nothing to compare
    run = make_run(tmp_path, rollouts=[*rows, rollout(2, prompt="q")], evaluations=once)
    told = data_of(write_report(run))["rollouts"]
    pairs = [(told["rows"][a], told["rows"][b]) for a, b in told["pairs"]]
    assert [(a["step"], b["step"], a["sample"]) for a, b in pairs] == [(1, 9, 0), (1, 9, 1)]


def check_page(browser, page, **how):
    """Opens a report, which fetches nothing."""
    browser.check(page.as_uri(), **how)
    assert browser.requests == [page.as_uri()]


def test_curves_stand_together_and_heads_and_legends_agree(browser, tmp_path):
    run = make_run(tmp_path)
    with (run / "timings.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12, "time/other": -1e-7, "time/step": 0.0}) + "\n")
    check_page(browser, write_report(run))
    drawn = browser.evaluate("arrange(data)")
    titles = {panel["title"]: panel for panel in drawn["panels"]}
    assert {title: [line["name"] for line in titles[title]["lines"]] for title in titles} == {
        "Reward": ["rollout/reward", "validation/reward"],
        "KL to the initial model, nats per token": ["kl/initial_k1", "kl/initial_k3"],
        "KL to the initial model, nats per response": ["kl/initial_k3_response"],
        "KL to the previous step, nats per token": ["kl/previous_k3"],
        "KL to the previous step, nats per response": ["kl/previous_k3_response"],
        "KL to the reference, nats per token": ["kl/reference_k3"],
        "Sampler against learner, nats": ["mismatch/logprob_mean", "mismatch/logprob_max"],
        "Entropy, nats per token": ["train/entropy"],
        "Ended and truncated, share": ["rollout/ended", "validation/ended"],
        "Loss": ["train/loss"],
        "rollout/responses": ["rollout/responses"],
        "custom/thing": ["custom/thing"],
    }
    assert titles["custom/thing"]["section"] == "other"
    assert drawn["front"]["points"][1] == [3, 0.03, 0.3]
    first = drawn["time"]["phases"][0]
    assert (first["label"], first["seconds"]) == ("rollout generation", 24.0)
    assert first["share"] == pytest.approx(2 / 3, abs=1e-5)
    shown = (
        "[...document.querySelectorAll('.tile')].map(t => [...t.children].map(c => c.innerText))"
    )
    tiles = browser.evaluate(shown)
    assert tiles == [
        ["reward, last 4 steps", "0.95", "from 0.15"],
        ["held-out reward", "0.9", "from 0; best 0.9 at step 9"],
        ["KL to the initial model, k1, last step", "0.11", "nats per token; from 0"],
        ["ended, last 4 steps", "0.595", "from 0.515"],
        ["responses", "360", "sampled for training"],
        ["time", "36 s", "wall clock of the steps"],
    ]
    legends = browser.evaluate(
        "[...document.querySelectorAll('.legend span')].map(s => s.textContent)"
    )
    for label, value, _ in tiles[:4]:
        assert f"{label} {value}" in legends
    assert not re.search(r"[-−]0(\.0+)?(?![.\d])", browser.evaluate("page.innerText"))
    assert browser.evaluate("labels([0, 0.2, 0.4])") == ["0", "0.2", "0.4"]
    close = browser.evaluate("labels([0.99995, 0.999975, 1, 1.000025])")  # of importance ratios
    assert close == ["0.999950", "0.999975", "1.000000", "1.000025"]


def overlapping(path):
    """A run of four actors: two steps of two groups, the second one version behind."""
    run = make_run(path)
    calls = [
        ("generator-0", "sample", 0.0, 4.0, 0),
        ("generator-1", "sample", 0.0, 3.0, 0),
        ("scorer", "grade", 4.0, 5.0, None),
        ("learner", "learn", 5.0, 9.0, 1),
        ("generator-0", "sample", 5.0, 8.0, 0),
    ]
    names = ("actor", "what", "begin", "end", "version")
    ledger = Ledger(run, 0, 0)
    for call in calls:
        ledger.write("worked", **dict(zip(names, call, strict=True)))
    for group in range(4):
        ledger.write("sampled", group=group, by="generator-0", oldest=0, newest=0)
    ledger.learned(1, [0, 1], oldest=0, version=0)
    ledger.learned(2, [2, 3], oldest=0, version=1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"drift/staleness": 0.1, "drift/update": 0.2} for row in rows]
    (run / "metrics.jsonl").write_text(to_jsonl(rows))
    return run


def test_overlap_is_read_from_the_timeline_and_the_ledger(tmp_path):
    data = data_of(write_report(overlapping(tmp_path)))
    assert data["lags"] == [[0, 2], [1, 2]]
    assert data["timeline"]["spans"][2] == ["scorer", "grade", 4, 5, None]
    assert data["timeline"]["seconds"]["generator-0"] == {"": 7, "grades": 1, "weights": 1}
    assert data["timeline"]["seconds"]["learner"] == {"samples": 4, "grades": 1, "": 4}


def test_overlap_is_shown_where_there_is_any(browser, tmp_path):
    check_page(browser, write_report(make_run(tmp_path / "alone")))
    assert browser.evaluate("document.querySelector('#overlap').hidden")
    page = write_report(overlapping(tmp_path / "overlap"))
    for width in (390, 1300):
        check_page(browser, page, width=width)
        text = browser.evaluate("document.querySelector('#overlap').innerText")
        assert "Work of each actor, last 9 s" in text
        assert "4 groups; mean 0.5, largest 1 versions" in text
        assert "waits for weights 11.1% 1.00 s" in text
        assert "numerics 1.0e-6" in text
        assert "staleness 0.1" in text
        assert browser.evaluate("document.querySelectorAll('#overlap rect[data-i]').length") == 5
    place = browser.evaluate(
        "(() => { const e = document.querySelector('#overlap rect[data-i=\"3\"]');"
        "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
        "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    browser.move(*place)
    browser.wait("document.querySelector('#tip').style.display === 'block'")
    tip = browser.evaluate("document.querySelector('#tip').textContent")
    assert tip == "learner: learning (learn)\n4 s, until second 9\nversion 1"


def test_a_browser_shows_it_and_its_controls_work(browser, tmp_path):
    rows = [rollout(step, k, prompt=f"p{k}") for step in range(10) for k in range(3)]
    rows.append(rollout(4, prompt="odd", tokens=["needle", "<|im_end|>"], reward=-2.0))
    page = write_report(make_run(tmp_path, rollouts=rows))
    check_page(browser, page, width=400, dark=True)
    check_page(browser, page, width=1280)

    def count():
        return browser.evaluate("document.querySelector('#counts').textContent")

    def enter(field, value):
        browser.evaluate(
            f"{{ const e = document.querySelector('#{field}'); e.value = {json.dumps(value)};"
            "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input')); }"
        )

    assert browser.evaluate("document.querySelector('#state').textContent").startswith("finished")
    assert browser.evaluate("document.querySelectorAll('svg path').length") > 8
    assert browser.evaluate("document.querySelectorAll('#times tr').length") == 5
    assert count() == "12 shown, 31 match, 31 in this page, all that are on disk."
    browser.evaluate("document.querySelector('#more').click()")
    assert count().startswith("24 shown, 31 match")
    enter("text", "NEEDLE")
    assert count().startswith("1 shown, 1 match")
    enter("text", "")
    enter("low", "0.75")
    assert count().startswith("6 shown, 6 match")
    enter("low", "")
    enter("from", "2")
    enter("to", "3")
    assert count().startswith("6 shown, 6 match")
    enter("source", "1")
    assert count().startswith("0 shown, 0 match")
    enter("source", "0")
    enter("from", "")
    enter("to", "")
    enter("order", "reward")
    first = "document.querySelector('#list .meta').textContent"
    assert "reward -2" in browser.evaluate(first)

    colours = (
        "[...document.querySelectorAll('#pairs .text span')].map(e => e.style.backgroundColor)"
    )
    by_logprob = browser.evaluate(colours)
    assert all("--hot" in colour for colour in by_logprob)
    browser.evaluate("document.querySelector('[data-mode=gap]').click()")
    assert all("--cold" in colour for colour in browser.evaluate(colours))  # the learner is higher
    browser.evaluate("document.querySelector('[data-mode=plain]').click()")
    assert browser.evaluate(colours) == []
    browser.evaluate("document.querySelector('[data-mode=logprob]').click()")
    assert browser.evaluate(colours) == by_logprob
    assert browser.evaluate("document.querySelectorAll('#pairs .card').length") == 3
    assert "first and last seen: 3 of 3" in browser.evaluate(
        "document.querySelector('#pair-count').textContent"
    )

    def hover(selector):
        place = browser.evaluate(
            f"(() => {{ const e = document.querySelector('{selector}');"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        browser.move(*place)
        browser.wait("document.querySelector('#tip').style.display === 'block'")
        return browser.evaluate("document.querySelector('#tip').textContent")

    assert re.match(r"step \d+\nreward  ", hover("#reward svg"))
    assert hover("#pairs .text span").startswith('token 1: "a"\nlog p  -0.5')
    assert browser.problems == []


def test_hostile_text_is_shown_as_text(browser, tmp_path):
    rows = [rollout(s, prompt=text, tokens=(text, text)) for text in HOSTILE for s in (0, 1)]
    rows.append(rollout(0, tokens=["z"] * 3_000))
    page = write_report(make_run(tmp_path, rollouts=rows))
    check_page(browser, page, width=400)
    browser.evaluate("document.querySelector('#more').click()")
    for mode in ("gap", "plain", "logprob"):
        browser.evaluate(f"document.querySelector('[data-mode={mode}]').click()")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("window.hacked") is None
    texts = browser.evaluate("document.querySelector('#list').textContent")
    assert HOSTILE[0] in texts
    assert HOSTILE[1] in texts
    assert "left ⟨202E⟩ right ⟨2066⟩⟨200F⟩" in texts
    assert "\u202e" not in texts
    assert "⟨00⟩⟨07⟩⟨1B⟩[31m⟨0D⟩↵" in texts
    assert "truncated here: 2,000 of 3,000 tokens, 3,000 characters in all" in texts
    assert browser.problems == []


def user(text, role="user"):
    return {"role": role, "content": text}


def turn(start, end, text, *messages, reward=None, error=None, **more):
    named = {"start": start, "end": end, "text": text, "messages": list(messages)}
    return named | {"reward": reward, "metrics": {}, "error": error} | more


def episode(step, turns, *, first="Guess!", **changes):
    tokens = [f"t{k} " for k in range(max((t["end"] for t in turns), default=0))]
    given = {"first_messages": [user(first)], "turns": turns, "asked": first, "forced": []}
    return rollout(step, tokens=tokens, **(given | changes))


CALLED = 'See.\n<tool_call>\n{"name": "look", "arguments": {"at": "x<y"}}\n</tool_call>'
FAILED = {"reward": None, "status": "error"}
EPISODES = {
    "won": episode(
        1,
        [
            turn(0, 2, "32", user("lower"), reward=-0.1, metrics={"guesses": 1.0}),
            turn(5, 8, CALLED, user("found", "tool"), reward=0.25),
        ],
    ),
    "cut": episode(2, [turn(0, 1, "1", user("no")), turn(2, 3, "2", user("no"))], finish="length"),
    "broken": episode(3, [turn(0, 1, "7", error="step raised <b>\x1b[31mRuntimeError")], **FAILED),
    "never begun": episode(4, [turn(0, 0, "", error="reset took more than 20 s")], **FAILED),
    "aborted": episode(5, [], finish="abort", **FAILED),
    "hostile": episode(6, [turn(0, 1, t, user(t, "tool")) for t in HOSTILE], first=HOSTILE[1]),
    "huge": episode(7, [turn(0, 1, "y" * 9_000, user("x" * 500_000))]),
    "endless": episode(8, [turn(k, k + 1, "more", user("go")) for k in range(5_000)]),
}


def episodes_run(path, **more):
    """A run with one episode of each kind, and the times of the first."""
    run = make_run(path, rollouts=[rollout(0), *EPISODES.values()], **more)
    times = {"file": "rollouts.jsonl", "step": 1, "group": 1, "sample": 0, "seconds": [0.0012, 3.5]}
    (run / responses.TURN_TIMES).write_text(json.dumps(times) + "\n")
    return run


def test_the_responses_of_a_page_have_the_turns_of_episodes(tmp_path):
    rows = {
        row["step"]: row
        for row in data_of(write_report(episodes_run(tmp_path)))["rollouts"]["rows"]
    }
    assert "turns" not in rows[0]
    assert [t["seconds"] for t in rows[1]["turns"]] == [0.0012, 3.5]
    assert all("seconds" not in t for t in rows[2]["turns"])
    (long,) = rows[7]["turns"]
    (answer,) = long["messages"]
    assert (len(long["text"]), long["characters"]) == (responses.TEXT, 9_000)
    assert (len(answer["content"]), answer["characters"]) == (responses.TEXT, 500_000)
    assert (len(rows[8]["turns"]), rows[8]["turn_count"]) == (responses.TURNS, 5_000)


def test_the_turns_of_one_episode_do_not_fill_a_page(tmp_path):
    long = [turn(k, k + 1, "y" * 5_000, user("z" * 5_000, "tool")) for k in range(150)]
    run = make_run(tmp_path, rollouts=[episode(1, long)])
    (row,) = data_of(write_report(run))["rollouts"]["rows"]
    assert len(row["turns"]) == 150
    assert {len(t["text"]) for t in row["turns"]} == {responses.SHORTEST}
    assert row["turns"][-1]["messages"][0]["characters"] == 5_000
    assert len(json.dumps(row)) < 120_000


def test_times_of_turns_do_not_select_other_responses(tmp_path):
    """A run that is repeated has other times and shows the same responses."""
    found = []
    rows = [e | {"group": k} for k in range(40) for e in (EPISODES["won"], EPISODES["cut"])]
    for name, seconds in (("a", 0.5), ("b", 0.123456)):
        run = make_run(tmp_path / name, rollouts=rows)
        times = [{"file": "rollouts.jsonl", "step": 1, "group": k, "sample": 0} for k in range(40)]
        (run / responses.TURN_TIMES).write_text(
            to_jsonl(t | {"seconds": [seconds] * 2} for t in times)
        )
        shown = data_of(write_report(run, limit=9_000))["rollouts"]["rows"]
        found.append([(row["step"], row["group"]) for row in shown])
    assert found[0] == found[1]
    assert 4 < len(found[0]) < 80


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1300, False)])
def test_an_episode_is_shown_as_a_conversation(browser, tmp_path, width, dark):
    check_page(browser, write_report(episodes_run(tmp_path)), width=width, dark=dark)
    cards = browser.evaluate("[...document.querySelectorAll('#list .card')].map(c => c.innerText)")
    shown = {
        row["step"]: card for row, card in zip([rollout(0), *EPISODES.values()], cards, strict=True)
    }
    in_order = [
        "user",
        "Guess!",
        "turn 1",
        "reward -0.1",
        "environment 1.2 ms",
        "guesses 1",
        "lower",
    ]
    in_order += ["turn 2", "reward 0.25", "environment 3.5 s", 'calls look {"at":"x<y"}', "tool"]
    in_order += ["found", "ended by the environment after 2 turns"]
    place = 0
    for text in in_order:
        assert text in shown[1][place:], text
        place = shown[1].index(text, place) + 1
    assert shown[2].count("truncated after 2 turns") == 2  # above and below the conversation
    assert "the environment failed in turn 1" in shown[3]
    assert "The environment failed: step raised <b>⟨1B⟩[31mRuntimeError" in shown[3]
    assert "The environment did not start: reset took more than 20 s" in shown[4]
    assert "turn 1" not in shown[4]
    assert "aborted by the engine after 0 turns" in shown[5]
    assert "truncated here: 4,000 of 500,000 characters" in shown[7]
    assert "4,800 further turns not shown" in shown[8]
    assert "ended by the environment after 5,000 turns" in shown[8]
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert HOSTILE[0] in shown[6]
    assert "\x1b" not in shown[6]
    browser.evaluate("document.querySelector('[data-mode=plain]').click()")
    assert "32" in browser.evaluate("document.querySelectorAll('#list .assistant')[0].innerText")
    browser.evaluate("document.querySelector('[data-mode=logprob]').click()")
    bubble = "document.querySelectorAll('#list .assistant')[1].querySelector('.text')"
    assert browser.evaluate(f"{bubble}.textContent") == "t5 t6 t7 "  # the tokens of the turn
    assert browser.evaluate(f"{bubble}.firstChild.dataset.k") == "5"
    browser.evaluate(
        "(e => { e.value = 'found'; e.dispatchEvent(new Event('input')); })("
        "document.querySelector('#text'))"
    )
    assert browser.evaluate("document.querySelectorAll('#list .card').length") == 1
    assert browser.problems == []


def test_a_browser_shows_the_whole_of_a_long_prompt(browser, tmp_path):
    short, long = "What is 2 + 2?\n" * 5, "Think about the following. " * 100 + "The very end."
    rows = [rollout(step, prompt=text) for text in (short, long) for step in (0, 1)]
    page = write_report(make_run(tmp_path, rollouts=rows))
    for width in (390, 1300):
        check_page(browser, page, width=width)
        cut = """[...document.querySelectorAll('.prompt')].filter(e =>
            e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1).length"""
        assert browser.evaluate(cut) == 0
        browser.evaluate("document.querySelectorAll('.prompt details').forEach(d => d.open = true)")
        assert browser.evaluate(cut) == 0
        shown = browser.evaluate("document.querySelector('#list').innerText")
        assert long in shown
        assert short.strip() in shown


def test_a_run_that_has_just_started(browser, tmp_path):
    """Step 0 is what was measured before the first step; a chart has two points or no card."""
    said = {
        0: "No step has finished yet",
        1: "No step has finished yet",
        2: "Recipe and environment",
    }
    for steps, text in said.items():
        run = make_run(tmp_path / str(steps), steps, finished=False)
        check_page(browser, write_report(run))
        assert text in browser.evaluate("document.querySelector('main').textContent")
        browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        browser.wait("[...document.querySelectorAll('svg')].every(svg => svg.childElementCount)")
        empty = """[...document.querySelectorAll('svg')].filter(svg =>
            !svg.querySelector('path[d*=L]') && svg.querySelectorAll('rect').length < 6).length"""
        assert browser.evaluate(empty) == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "custom/rare": 7.0, "rollout/part_a": -0.0}) + "\n")
    check_page(browser, write_report(run))
    drawn = browser.evaluate("arrange(data)")
    assert all(any(len(line["points"]) > 1 for line in p["lines"]) for p in drawn["panels"])
    # A curve may have a lone point beside it: the first validation.
    (reward,) = [panel for panel in drawn["panels"] if panel["title"] == "Reward"]
    assert [len(line["points"]) for line in reward["lines"]] == [2, 1]
    assert drawn["once"] == [["rollout/part_a", 0], ["custom/rare", 7]]
    alone = tmp_path / "alone"
    make_run(alone, 0, finished=False)
    (alone / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 1.0}) + "\n")
    check_page(browser, write_report(alone))
    assert "Curves begin" in browser.evaluate("document.querySelector('main').textContent")


def write_status(run, state="running", progress=SAMPLING, *, age=2.0):
    report.write_status(run, state, progress, now=NOW - age)


def test_a_status_in_words(tmp_path):
    write_status(tmp_path)
    assert report.run_state(tmp_path, 2, 14, now=NOW) == {
        "kind": "running",
        "text": "running, 2 of 14 steps",
        "doing": "generate: sampling 64 responses, 1,234 of 4,096 tokens, 210 tokens per second, "
        "about 9 minutes left",
        "share": pytest.approx(0.3013, abs=1e-4),
        "error": None,
        "command": None,
    }
    write_status(tmp_path, progress=Progress("learn", ""))
    told = report.run_state(tmp_path, 1, None, now=NOW)
    assert (told["text"], told["doing"], told["share"]) == ("running, 1 step", "learn", None)


def test_a_run_that_says_nothing_for_a_minute_is_not_called_running(tmp_path):
    write_status(tmp_path, age=59)
    assert report.run_state(tmp_path, 2, 14, now=NOW)["kind"] == "running"
    write_status(tmp_path, age=180)
    told = report.run_state(tmp_path, 2, 14, now=NOW)
    assert told["text"] == "no sign of life for 3 minutes, 2 of 14 steps"
    assert (told["kind"], told["doing"], told["share"]) == ("silent", "", None)
    (tmp_path / "summary.json").write_text("{}")
    assert report.run_state(tmp_path, 2, 14, now=NOW)["text"] == "finished, 2 of 14 steps"


def test_the_steps_of_a_supervised_run_are_those_it_says(tmp_path):
    assert report.run_state(tmp_path, 2, None, now=NOW)["text"] == "stopped early, 2 steps"
    write_status(tmp_path)
    assert report.run_state(tmp_path, 2, None, now=NOW)["text"] == "running, 2 of 14 steps"
    assert report.run_state(tmp_path, 2, 20, now=NOW)["text"] == "running, 2 of 20 steps"


def test_how_a_run_ended(tmp_path):
    for state, text in (("failed", "failed"), ("stopped", "stopped early")):
        write_status(tmp_path, state)
        told = report.run_state(tmp_path, 2, 14, now=NOW)
        assert (told["kind"], told["text"]) == (state, f"{text}, 2 of 14 steps")
        assert told["command"] == f"burnish resume {tmp_path}"


FAILED = report.Failure(
    "disk full", f"can't write a:\n{HOSTILE[1]}", "free space", "burnish resume a"
)


def test_a_page_says_why_a_run_failed_and_how_it_goes_on(browser, tmp_path):
    run = make_run(tmp_path / "run", finished=False)
    write_status(run)
    report.write_failure(run, FAILED, now=NOW)
    for width in (390, 1300):
        check_page(browser, write_report(run), width=width)
        assert browser.evaluate("document.querySelector('#state').className") == "chip failed"
        shown = browser.evaluate("document.querySelector('#trouble').innerText").split("\n")
        lines = [text for text in shown if text]
        assert lines[:3] == ["Failed: disk full", "can't write a:", HOSTILE[1]]
        assert lines[3:] == ["Remedy: free space", "Continue with: burnish resume a"]
    again = FAILED._replace(remedy="", command="", lead="correct the recipe")
    report.write_failure(run, again, now=NOW)
    check_page(browser, write_report(run))
    shown = browser.evaluate("document.querySelector('#trouble').innerText")
    assert shown.endswith("Correct the recipe.")
    assert browser.evaluate("window.hacked") is None
    write_status(run)  # its process was killed long ago
    check_page(browser, write_report(run))
    shown = browser.evaluate("document.querySelector('#trouble').innerText")
    assert shown == f"If its process has ended, continue with: burnish resume {run}"
    (run / "summary.json").write_text("{}")
    check_page(browser, write_report(run))
    for name in ("trouble", "warnings"):
        assert browser.evaluate(f"document.querySelector('#{name}').hidden")


def test_a_page_warns_of_a_run_that_has_not_learned(browser, tmp_path):
    run = make_run(tmp_path / "run")
    rows = [{"step": k, "rollout/responses": 8, "rollout/dead_groups": 1} for k in range(1, 9)]
    (run / "metrics.jsonl").write_text(to_jsonl(rows))
    check_page(browser, write_report(run), width=390)
    shown = browser.evaluate("document.querySelector('#warnings').innerText")
    assert shown.startswith("Warning: All of the groups were dead")
    (run / "metrics.jsonl").write_text(to_jsonl(rows[:1]) + '{"step": 2, "kl/initial_k1": NaN}\n')
    assert "was not finite" in data_of(write_report(run))["warnings"][-1]
