"""Sections of a recipe reach the parts that read them."""

from dataclasses import replace

from burnish.launch.settings import make_evaluator, rollout_settings
from burnish.recipe.load import load_recipe


def test_training_draws_as_the_recipe_says_and_evaluation_from_the_whole_model():
    sets = ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.min_p=0.05"]
    sets += ["rollout.repetition_penalty=1.1", "rollout.truncated=true", "rollout.min_tokens=2"]
    recipe = load_recipe("keywords", sets)
    params = rollout_settings(recipe).params
    drawn = (params.top_p, params.top_k, params.min_p, params.repetition_penalty)
    assert drawn == (0.9, 50, 0.05, 1.1)
    whole = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}
    evaluator = make_evaluator(recipe, None, None, None)
    longest = recipe.validation.max_tokens
    assert evaluator.params == replace(params, max_tokens=longest, **whole)
