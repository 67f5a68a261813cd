"""Recipes: their settings as pydantic models, the rules that join them, and the plan of a run.

``burnish.recipe.load`` reads, checks and writes recipes.
"""
