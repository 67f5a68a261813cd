import pytest

from burnish.graders.extract import answer_tags, boxed, hash_answer, last_number


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("So it is 4. </think> <answer>4</answer>", "4"),
        ("So it is 4.</think><answer> 4 </answer>\n", "4"),
        ("a\n</think>\n\n<answer>\nx = 4\n</answer>  \n", "x = 4"),
        ("<think> a </think> <answer>4</answer>", "4"),
        ("a </think> <answer>\\frac{1}{2}</answer>", "\\frac{1}{2}"),
        ("a </think> <answer></answer>", None),
        ("a </think> <answer>4", None),
        ("a <answer>4</answer>", None),
        ("a </think> 4", None),
        ("a </think> so <answer>4</answer>", None),
        ("a </think> <answer>4</answer> or so", None),
        ("a </think> <answer>4</answer><answer>5</answer>", None),
        ("a </think> <answer>4</answer></answer>", None),
        ("a </think> <answer><answer>4</answer>", None),
        ("a </think> b </think> <answer>4</answer>", None),
        ("<answer>3</answer> a </think> <answer>4</answer>", None),
        ("<answer>4</answer> </think>", None),
        ("a </THINK> <answer>4</answer>", None),
        ("", None),
    ],
)
def test_answer_tags(response, answer):
    assert answer_tags(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so $\boxed{4}$.", "4"),
        (r"\boxed{3} or rather \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}} is it", r"\left\{1, 2\right\}"),
        (r"\boxed{\{x \mid x > 3\}}", r"\{x \mid x > 3\}"),
        (r"\boxed{\text{a } b}", r"\text{a } b"),
        (r"\fbox{4}", "4"),
        (r"\boxed {4}", "4"),
        (r"\boxed 4$", "4"),
        (r"\boxed{x = \boxed{4}}", "4"),
        (r"\boxed{3} and then \boxed{4", None),
        (r"\boxed{}", None),
        (r"\boxed", None),
        (r"\boxed{4}, in \boxed as asked", "4"),
        ("4", None),
    ],
)
def test_boxed(response, answer):
    assert boxed(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Tom has 3 + 4 = 7.\n#### 7", "7"),
        ("#### 3\n#### 1,234\n", "1,234"),
        ("####7\nDone.", "7"),
        ("####", None),
        ("7", None),
    ],
)
def test_hash_answer(response, answer):
    assert hash_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 42.", "42"),
        ("It costs $1,234.50.", "1,234.50"),
        ("3 + 4 = 7, so 7 apples", "7"),
        ("x = -5", "-5"),
        ("10-5", "5"),
        ("a probability of 3/4.", "3/4"),
        ("about 60%.", "60"),
        ("1e-5 is small", "1e-5"),
        (".5", ".5"),
        ("1,2", "2"),
        ("12,345,678 people", "12,345,678"),
        ("no number", None),
        ("", None),
        ("٣", None),
    ],
)
def test_last_number(response, answer):
    assert last_number(response) == answer
