"""The live page: its server over HTTP, then the pages in a real browser."""

import http.client
import json
import re
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from burnish.console.progress import Progress
from burnish.errors import RunError
from burnish.runs import live_page, report
from burnish.runs.metrics import iterate_rows
from tests.runs.test_report import EPISODES, HOSTILE, episodes_run, make_run, rollout, user


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Pages look often."""
    monkeypatch.setattr(live_page, "EVERY", 0.1)


@contextmanager
def serving(path):
    with live_page.Server(path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server, path, *, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name in [f"127.0.0.1:{server.server_port}"] if host is None else host:
        connection.putheader("Host", name)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def tell(run, *progress, updated=None, **more):
    """The run says what it is doing."""
    now = time.time() if updated is None else updated
    report.write_status(run, "running", Progress(*progress, **more), now=now)


def append_step(run, step, **more):
    row = {"step": step, "rollout/reward": step / 10, "train/loss": 0.1} | more
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_only_this_machine_is_listened_to(tmp_path):
    with serving(tmp_path) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"
        with socket.socket() as other, pytest.raises(OSError, match=r"refused|unreachable"):
            other.connect(("127.0.0.2", server.server_port))


def test_a_port_that_is_taken_is_one_message(tmp_path):
    with (
        live_page.Server(tmp_path, 0) as server,
        pytest.raises(
            RunError,
            match=rf"port {server.server_port}: Address already in use; choose another port",
        ),
    ):
        live_page.Server(tmp_path, server.server_port)


def test_a_place_without_runs(tmp_path):
    with pytest.raises(RunError, match=r"directory of runs, .*none is neither"):
        live_page.Server(tmp_path / "none", 0)
    assert "No run is here yet" in live_page.respond(tmp_path, "/").text


def test_a_foreign_host_is_refused(tmp_path):
    make_run(tmp_path / "run")
    with serving(tmp_path) as server:
        port = server.server_port
        for good in ("127.0.0.1", "localhost", f"localhost:{port}", "localhost:9999"):
            assert get(server, "/", host=[good])[0].status == 200
        bad = (
            ["evil.example"],
            [f"evil.example:{port}"],
            ["127.0.0.1.evil.example"],
            ["x:localhost"],
        )
        for hosts in (*bad, [], ["localhost", "localhost"], [""]):
            for path in ("/", "/run/run", "/run/run/data"):
                answer, body = get(server, path, host=hosts)
                assert answer.status == 403
                assert "run" not in body


def test_get_is_all_there_is(tmp_path):
    with serving(tmp_path) as server:
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert get(server, "/", method=method)[0].status == 501


def test_nothing_beside_the_runs_is_served(tmp_path):
    secret = make_run(tmp_path / "secret")
    runs = tmp_path / "runs"
    make_run(runs / "run")
    (runs / "run" / "note.txt").write_text("private")
    paths = ["/run/../secret", "/run/..%2fsecret", "/run/%2e%2e%2fsecret", "/../secret", "//secret"]
    paths += [f"/run/{secret}", "/run/%2Fetc", "/run/run/note.txt", "/run/run/../../secret"]
    paths += ["/run/run/recipe.toml", "/run/run/", "/run/", "/run", "/run/..", "/run/.", "/%00"]
    with serving(runs) as server:
        for path in paths:
            assert get(server, path)[0].status == 404, path
    with serving(runs / "run") as server:  # one run: its neighbours are not served
        make_run(runs / "other")
        assert server.url.endswith("/run/run")
        assert get(server, "/run/run")[0].status == 200
        assert get(server, "/run/other")[0].status == 404
        assert "/run/other" not in get(server, "/")[1]


def test_every_page_has_a_strict_policy(tmp_path):
    make_run(tmp_path / "run")
    with serving(tmp_path) as server:
        for path in ("/", "/run/run", "/run/run/status", "/run/run/data", "/none"):
            answer, body = get(server, path)
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'")
            assert "frame-ancestors 'none'" in policy
            assert not re.search(r"script-src[^;]*unsafe|\*|https?:", policy)
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"
            if path in ("/", "/run/run"):
                assert "script-src 'sha256-" in policy
                assert body.count("http-equiv") == 1


def test_the_list_says_how_runs_stand(tmp_path):
    make_run(tmp_path / "done")
    make_run(tmp_path / "half", 2, finished=False)
    make_run(tmp_path / "odd")
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"train/loss": 1.0}\n')
    make_run(tmp_path / "broken")
    (tmp_path / "broken" / "metrics.jsonl").write_text("{\n{\n")
    (tmp_path / "no run").mkdir()
    now = time.time()
    tell(tmp_path / "half", "", "sampling", seconds_left=180, updated=now)
    rows = {row["name"]: row for row in live_page.list_runs(tmp_path, now + 30)}
    assert rows.keys() == {"done", "half", "broken", "odd"}
    done = rows["done"]
    assert (done["link"], done["state"]["kind"]) == ("/run/done", "finished")
    assert done["state"]["text"] == "finished, 11 of 100 steps"
    assert re.fullmatch(r"(29|3\d) seconds", done["updated"])
    assert rows["half"]["state"]["doing"] == "sampling, about 3 minutes left"
    assert "is not JSON" in rows["broken"]["state"]["text"]
    assert "can't be read" in rows["odd"]["state"]["text"]
    report.write_failure(tmp_path / "half", report.Failure("k", "why\nmore", "r", "c"), now=now)
    failed = {row["name"]: row for row in live_page.list_runs(tmp_path, now)}["half"]
    assert (failed["state"]["kind"], failed["state"]["error"]["command"]) == ("failed", "c")
    assert "<br>why<" in live_page.respond(tmp_path, "/").text
    tell(tmp_path / "half", "", "sampling", seconds_left=180, updated=now)
    late = {row["name"]: row for row in live_page.list_runs(tmp_path, now + 200)}
    assert late["half"]["state"]["text"] == "no sign of life for 3 minutes, 1 of 100 steps"
    with serving(tmp_path) as server:
        answer, body = get(server, "/run/broken/status")
        assert answer.status == 500
        assert "is not JSON" in body
        body = get(server, "/")[1]
        assert '<td class="n" title="reward">0.95</td>' in body
        assert '<td class="n" title="held out">0.9</td>' in body
        assert '<td class="n" title="reward">–</td>' in body


def test_an_unchanged_run_is_not_drawn_again(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    drawn, real = [], live_page.report.report_data
    monkeypatch.setattr(
        live_page.report, "report_data", lambda *a, **k: drawn.append(a) or real(*a, **k)
    )
    first = live_page.run_status(run, 0.0)["version"]
    for _ in range(3):
        assert live_page.run_status(run, 0.0)["version"] == first
    assert len(drawn) == 1
    append_step(run, 12)
    assert live_page.run_status(run, 0.0)["version"] != first
    assert len(drawn) == 2


def test_of_long_files_the_two_ends_are_read(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(1000)))
    some = [row["n"] for row in iterate_rows(file, 200)]
    assert some[0] == 0
    assert some[-1] == 999
    assert 20 < len(some) < 50
    assert some == sorted(set(some))
    assert [row["n"] for row in iterate_rows(file, 10**6)] == list(range(1000))


def test_the_newest_responses_of_a_long_run_are_shown(tmp_path, monkeypatch):
    rows = [rollout(step, prompt=f"p{step}", tokens=["word "] * 50) for step in range(1, 400)]
    run = make_run(tmp_path / "run", rollouts=rows)
    monkeypatch.setattr(live_page, "LIMIT", 150_000)
    monkeypatch.setattr(live_page, "REACH", 60_000)
    told = live_page.live_data(run, 0.0, home=True)["rollouts"]
    steps = [row["step"] for row in told["rows"]]
    assert steps[-3:] == [397, 398, 399]
    assert told["ends"]


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent")


@pytest.mark.parametrize("width", [390, 1300])
def test_a_page_follows_its_run_without_being_loaded_again(browser, tmp_path, width):
    rows = [rollout(step, k, prompt="Say it. " * 120) for step in range(3) for k in range(3)]
    run = make_run(tmp_path / "run", 3, rollouts=rows, finished=False)
    with serving(tmp_path) as server:
        browser.check(f"{server.url}run/run", width=width)
        browser.evaluate("window.stayed = 1")
        browser.evaluate("document.querySelectorAll('#other details')[0].open = true")
        browser.evaluate("document.querySelector('#list .prompt details').open = true")
        browser.evaluate("document.querySelector('#text').value = 'say'")
        browser.evaluate("document.querySelector('#text').focus()")
        browser.evaluate("document.querySelector('#policy').scrollIntoView()")
        top = "document.querySelector('#policy h2').getBoundingClientRect().top"
        before = browser.evaluate(top)
        recipe = "document.querySelector('#recipe pre')"
        browser.evaluate(f"window.kept = {recipe}")
        assert text(browser, ".tile b") == "0.2"
        tell(run, "learn", "step 2 of 4", done=1, total=4, seconds_left=300)
        for step in range(3, 6):
            append_step(run, step)
        with (run / "rollouts.jsonl").open("a") as file:
            file.write(json.dumps(rollout(5, tokens=["the newest"])) + "\n")
        browser.wait("document.querySelector('.tile b').textContent === '0.45'")
        browser.wait("document.querySelector('#now').textContent.startsWith('learn: step 2 of 4')")
        assert "about 5 minutes left" in text(browser, "#now")
        assert text(browser, "#state") == "running, 5 of 100 steps"
        assert "reward, last 2 steps 0.45" in text(browser, "#reward .legend")
        assert "the newest" in text(browser, "#list .card")
        assert browser.evaluate("window.stayed") == 1
        assert browser.evaluate(top) == pytest.approx(
            before, abs=1
        )  # what is read stays where it is
        assert browser.evaluate("document.querySelectorAll('#other details')[0].open")
        assert (
            browser.evaluate("document.querySelectorAll('#list .prompt details[open]').length") == 1
        )
        assert (
            browser.evaluate("document.activeElement.id + document.activeElement.value")
            == "textsay"
        )
        assert browser.evaluate(f"{recipe} === window.kept")  # what has not changed was not touched
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        (run / "summary.json").write_text("{}")
        browser.wait("document.querySelector('#state').className === 'chip finished'")
        assert browser.evaluate("document.querySelector('#now').hidden")
        assert browser.problems == []
    browser.wait("document.querySelector('#now').textContent.includes('watch has ended')")


@pytest.mark.parametrize("width", [390, 1300])
def test_the_list_follows_its_runs(browser, tmp_path, width):
    run = make_run(tmp_path / ("a-long-name" * 9), 3, finished=False)
    with serving(tmp_path) as server:
        browser.check(server.url, width=width)
        browser.evaluate("document.querySelector('a').focus()")
        assert browser.evaluate("document.querySelectorAll('td')[2].textContent") == "0.2"
        append_step(run, 3)
        browser.wait("document.querySelectorAll('td')[2].textContent === '0.3'")
        assert browser.evaluate("document.activeElement === document.querySelector('a')")
        make_run(tmp_path / "second")
        browser.wait("document.querySelectorAll('td').length === 10")
        browser.evaluate("document.querySelectorAll('a')[0].click()")
        browser.wait("document.querySelector('#recipe pre') !== null")
        assert browser.problems == []


def test_what_is_being_read_is_not_replaced(browser, tmp_path):
    run = make_run(tmp_path / "run", 3, rollouts=[rollout(1)], finished=False)
    with serving(run) as server:
        browser.check(server.url, width=1300)
        browser.evaluate("document.querySelector('#list').scrollIntoView({block: 'center'})")
        box = "(b => [b.x + 9, b.y + 9])(document.querySelector('#list').getBoundingClientRect())"
        browser.move(*browser.evaluate(box))
        with (run / "rollouts.jsonl").open("a") as file:
            file.write(json.dumps(rollout(5, tokens=["the newest"])) + "\n")
        append_step(run, 3)
        browser.wait("document.querySelector('.tile b').textContent === '0.3'")
        assert browser.evaluate("document.querySelectorAll('#list .card').length") == 1
        browser.move(1, 1)
        browser.wait("document.querySelectorAll('#list .card').length === 2")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1300, True)])
def test_the_page_of_a_running_run_shows_conversations(browser, tmp_path, width, dark):
    run = episodes_run(tmp_path / "run", finished=False)
    tell(run, "generate", "sampling", unit="responses", total=8, turn="turn 3 of 12")
    with serving(run) as server:
        browser.check(server.url, width=width, dark=dark)
        browser.wait("document.querySelector('#now')?.textContent.includes('turn 3 of 12')")
        assert "truncated after 2 turns" in text(browser, "#list")
        assert browser.evaluate("document.querySelectorAll('#list .bubble').length") > 20
        new = EPISODES["won"] | {"step": 9, "first_messages": [user("the newest")]}
        with (run / "rollouts.jsonl").open("a") as file:
            file.write(json.dumps(new) + "\n")
        append_step(run, 13)
        browser.wait("document.querySelector('#list').textContent.includes('the newest')")


def test_a_hostile_run_injects_nothing(browser, tmp_path):
    name = "\"><img src=x onerror=window.hacked=4><script>window.hacked=5<'"
    rows = [rollout(s, prompt=said, tokens=(said,)) for said in HOSTILE for s in (0, 1)]
    run = make_run(tmp_path / name, rollouts=rows, finished=False)
    for said in HOSTILE[:2]:
        append_step(run, 12, **{f"custom/{said}": 1.0})
        append_step(run, 13, **{f"custom/{said}": 2.0})
    recipe = (run / "recipe.toml").read_text()
    evil = json.dumps("</script><img src=x onerror=window.hacked=6>")
    (run / "recipe.toml").write_text(recipe.replace('name = "sort"', f"name = {evil}", 1))
    tell(run, HOSTILE[0], HOSTILE[1], unit=HOSTILE[1], total=1)
    with serving(tmp_path) as server:
        browser.check(server.url, width=390)
        assert name in text(browser, "td")
        assert HOSTILE[1] in text(browser, "td:nth-child(2)")
        browser.evaluate("document.querySelector('td a').click()")
        browser.wait("document.querySelector('#now')?.textContent.includes('onerror')")
        browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert HOSTILE[0] in text(browser, "#list")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.querySelectorAll('script').length") == 2
        assert browser.evaluate("window.hacked") is None
        # Even a script that got into the page would not run, and could not call home.
        browser.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"hacked=1\">')"
        )
        browser.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), "
            "{textContent: 'window.hacked = 1'}))"
        )
        assert browser.evaluate("window.hacked") is None
