import pytest

from burnish.console.text import counted, duration, printable


def test_one_is_singular():
    assert [counted(n, "gradient step") for n in (0, 1, 1000)] == [
        "0 gradient steps",
        "1 gradient step",
        "1,000 gradient steps",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 seconds"),
        (1.2, "1 second"),
        (119, "119 seconds"),
        (180, "3 minutes"),
        (7_199, "120 minutes"),
        (9_000, "2 hours"),
        (259_200, "3 days"),
    ],
)
def test_a_span_of_time_has_one_unit(seconds, text):
    assert duration(seconds) == text


def test_terminal_control_is_spelled_out():
    assert printable("a\x1b[31m\x07\r\x9b\u202eb\n\t漢👩\u200d🚀") == (
        "a\\x1b[31m\\x07\\r\\x9b\\u202eb\n\t漢👩\u200d🚀"
    )
