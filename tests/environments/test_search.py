"""Search in a folder of documents: ranked passages with document and line, and whole documents."""

import os

import pytest

from burnish.environments.protocol import ToolError
from burnish.environments.search import (
    PAGE_CHARS,
    SearchSource,
    build_index,
    passages,
    search_tools,
)
from burnish.environments.tools import ToolSettings, load_tools
from burnish.errors import DataError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rivers").mkdir()
    filler = "\n".join(f"Line {number} is about nothing." for number in range(200))
    (tmp_path / "rivers" / "danube.md").write_text(f"{filler}\nThe Danube flows through Ulm.\n")
    (tmp_path / "ulm.txt").write_text("Ulm has a minster.\nIts tower is 161.53 m tall.\n")
    (tmp_path / "image.png").write_bytes(b"\xff\xfe")
    return tmp_path


@pytest.fixture
def tools(folder):
    return search_tools(SearchSource(str(folder)))


def test_search_names_documents_and_lines(tools):
    search, _ = tools
    found = search("how tall is the tower")
    assert found.startswith("[1] ulm.txt, line 1: Ulm has a minster. Its tower is 161.53 m tall.")
    first = search("danube flow", 1)  # by the stems of words
    name, line = first.split(": ")[0].removeprefix("[1] ").split(", line ")
    assert name == "rivers/danube.md"
    assert 1 < int(line) <= 201
    assert "[2]" not in first
    assert search("zebra") == "no passage has these words"
    assert search("Ulm", 99).count("[") == 2


@pytest.mark.parametrize("query", ["NEAR(", "a AND", "text: x", "-zebra", 'z"b', "x" * 9999])
def test_a_query_is_only_words(tools, query):
    assert not tools[0](query).startswith("error")
    for empty in ("", '"', "*", "'; --"):
        with pytest.raises(ToolError, match="the query has no word"):
            tools[0](empty)


def test_a_document_is_read_page_by_page(tools):
    _, open_document = tools
    assert open_document("ulm.txt") == (
        "ulm.txt, lines 1 to 3:\nUlm has a minster.\nIts tower is 161.53 m tall.\n"
    )
    text, line, parts = "", 1, 0
    while line is not None:
        page = open_document("rivers/danube.md", line)
        assert len(page) < PAGE_CHARS + 100
        body, _, more = page.partition(":\n")[2].partition("\n[continues at line ")
        text, parts = text + body + "\n" * bool(more), parts + 1
        line = int(more.split()[0]) if more else None
    assert parts == 2
    assert text.startswith("Line 0")
    assert text.endswith("The Danube flows through Ulm.\n")
    with pytest.raises(ToolError, match=r"no document '../x'; some are rivers/danube.md, ulm.txt"):
        open_document("../x")
    with pytest.raises(ToolError, match=r"ulm.txt has the lines 1 to 3, got 9"):
        open_document("ulm.txt", 9)


def test_passages_cover_a_text_once():
    for text in ("", "a", "\n\n", "a\n\nb", *("\n".join(["word " * 30] * n) for n in range(1, 40))):
        found = list(passages(text))
        lines = text.split("\n")
        covered = []
        for line, passage in found:
            own = passage.split("\n")
            assert lines[line - 1 : line - 1 + len(own)] == own
            covered += own
        assert [x for x in covered if x.strip()] == [x for x in lines if x.strip()]


def test_a_fork_reads_the_index(folder):
    index = build_index({"a": "one two", "b": "three"})
    for _ in range(3):
        pid = os.fork()
        if not pid:
            found = index.execute("SELECT document FROM passages WHERE passages MATCH 'two'")
            os._exit(0 if found.fetchall() == [("a",)] else 1)
        assert os.waitpid(pid, 0)[1] == 0
    index.close()


def test_folders_that_are_refused(tmp_path, folder):
    for change, said in (
        ("none", "there is no folder"),
        ("empty", r"has no documents \(.txt, .md"),
        ("bytes", r"bad.txt can't be read as UTF-8"),
    ):
        path = tmp_path / change
        if change != "none":
            path.mkdir()
        if change == "bytes":
            (path / "bad.txt").write_bytes(b"\xff\xff")
        with pytest.raises(DataError, match=f"tool search: .*{said}"):
            search_tools(SearchSource(str(path)))
    (tmp_path / "bytes" / "bad.txt").unlink()
    twice = ToolSettings((SearchSource(str(folder)), SearchSource(str(folder))))
    with pytest.raises(DataError, match="two tools with the name search; rename one"):
        load_tools(twice)
