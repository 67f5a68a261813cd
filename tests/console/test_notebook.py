from burnish.console.notebook import NotebookDisplay, is_notebook
from burnish.console.progress import Progress


def test_one_output_is_updated():
    shown, now = [], [0.0]
    with NotebookDisplay("<run>", shown.append, clock=lambda: now[0]) as display:
        assert "&lt;run&gt;" in shown[-1]
        display(Progress("load", "loading <torch>"))
        assert "loading &lt;torch&gt;" in shown[-1]
        for done in range(100):  # frequent reports do not each redraw the output
            display(Progress("generate", "sampling", done, 100, "responses", step=1, steps=4))
        assert len(shown) == 2
        now[0] = 1.0
        display(Progress("generate", "sampling", 7, 8, "responses", step=1, steps=4))
        assert 'value="1" max="4"' in shown[-1]
        assert "7 of 8 responses" in shown[-1]
        metrics = {"rollout/reward": 0.5}
        left = 120.0
        display(Progress("step", "done", step=2, steps=4, metrics=metrics, seconds_left=left))
        assert "reward 0.500" in shown[-1]
        assert "about 2 minutes left" in shown[-1]
        display(Progress("note", "note: <slow>"))
        assert "note: &lt;slow&gt;" in shown[-1]
    assert "left" not in shown[-1]
    assert "reward 0.500" in shown[-1]


def test_a_test_is_no_notebook():
    assert not is_notebook()
