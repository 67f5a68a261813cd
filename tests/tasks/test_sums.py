"""Worked sums: their lines, and questions that do not repeat."""

import pytest

from burnish.errors import DataError
from burnish.recipe.load import load_recipe
from burnish.tasks.sums import draw_sums, small_sums, work_sum


@pytest.mark.parametrize(
    ("sum_", "lines"),
    [
        ("4 - 1", ["4 - 1 = 3"]),
        ("5 - 9 + 2", ["5 - 9 = -4", "-4 + 2 = -2"]),
        ("55 + 98 - 30", ["55 + 90 = 145", "145 + 8 = 153", "153 - 30 = 123"]),
        ("4 + 0", ["4 + 0 = 4"]),
        ("14 - 29", ["29 - 10 = 19", "19 - 4 = 15", "14 - 29 = -15"]),
        ("3 - 9 + 17", ["3 - 9 = -6", "17 - 6 = 11", "-6 + 17 = 11"]),
        ("2 - 60 + 8", ["60 - 2 = 58", "2 - 60 = -58", "58 - 8 = 50", "-58 + 8 = -50"]),
        ("0 - 5 - 12", ["0 - 5 = -5", "-5 - 10 = -15", "-15 - 2 = -17"]),
    ],
)
def test_sums_are_worked_term_by_term(sum_, lines):
    assert work_sum(f"State the final answer to the problem: {sum_} =") == "\n".join(lines)


def test_no_sum_is_drawn_twice():
    """More rows than the recipe has training prompts."""
    rows = draw_sums(load_recipe("arithmetic").task, 1200, seed=0)
    assert len({row["prompt"] for row in rows}) == len(rows) == 1200
    for row in rows:
        total = row["prompt"].rpartition(":")[2].strip().rstrip("= ")
        assert row["answer"].endswith(f" = {row['expected_answer']}")
        assert int(row["expected_answer"]) == eval(total)


def test_the_error_names_a_number_of_rows_that_exists():
    """0 + 0 to 9 + 9, without the held-out questions."""
    change = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load_recipe("arithmetic", {"task": {"settings": change, "validation_prompts": 8}}).task
    with pytest.raises(DataError, match=r"only (\d+) different questions; use --rows \1$") as error:
        draw_sums(task, 1000, seed=0)
    count = int(str(error.value).split()[-1])
    assert len(draw_sums(task, count, seed=0)) == count


def test_small_sums_have_their_running_totals():
    """9² + 9³ + 9⁴ = 7,371 sums, each once; the last total is the answer."""
    rows = small_sums(0)
    assert len({row["prompt"] for row in rows}) == len(rows) == 7371
    three = next(row for row in rows if row["prompt"] == "3+4+9=")
    assert (three["answer"], three["expected_answer"]) == ("07\n16", "16")
