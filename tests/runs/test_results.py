import json

from burnish.runs.results import write_evaluation
from tests.runs.test_report import rollout


def test_an_evaluation_shows_prompts_as_they_were_asked_and_whole(tmp_path):
    asked = ["How much is <b>2</b> + 2?", "Read this first. " * 500 + "The very end."]
    rows = [rollout(0, k, prompt=f"<|user|>{text}<|end|>") for k, text in enumerate(asked)]
    rows = [row | {"asked": text} for row, text in zip(rows, asked, strict=True)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("settings.json", "figures.json"):
        (tmp_path / name).write_text("{}")
    page = write_evaluation([tmp_path], tmp_path / "report.html").read_text()
    assert "How much is &lt;b&gt;2&lt;/b&gt; + 2?" in page
    assert f"<pre>{asked[1]}</pre></details>" in page
    assert "|user|" not in page.replace("prompt_id", "").split("<article")[1].split("</p>")[1]
