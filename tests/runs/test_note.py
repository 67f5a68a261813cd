import pytest

from burnish.errors import ConfigError, RunError
from burnish.runs.note import RunNote, read_note, write_note
from burnish.runs.run import Run
from tests.runs.test_comparison import make_run


def test_a_note_and_tags_are_kept_until_they_are_changed(tmp_path):
    run = make_run(tmp_path / "a", [1.0])
    assert read_note(run) == RunNote("", ())
    assert write_note(run, "first try", add=["base", "cpu", "base"]).tags == ("base", "cpu")
    assert write_note(run, add=["new"], remove=["cpu", "absent"]) == read_note(run)
    assert read_note(run) == RunNote("first try", ("base", "new"))
    opened = Run(run)
    opened.note, opened.tags = "second", ["x", "new"]
    assert (opened.note, opened.tags) == ("second", ("new", "x"))


@pytest.mark.parametrize("tag", ["", "two words", "a,b", "tab\t"])
def test_a_tag_is_one_word(tmp_path, tag):
    run = make_run(tmp_path / "a", [1.0])
    with pytest.raises(ConfigError, match="a tag must be a word"):
        write_note(run, "lost", add=["good", tag])
    assert read_note(run) == RunNote()


def test_only_a_run_has_a_note(tmp_path):
    with pytest.raises(RunError, match=r"no recipe\.toml"):
        write_note(tmp_path, "text")
