"""The pieces of an objective: advantage × ratio × loss × reduction × KL × importance.

A piece is one section here: its name, its settings, its formula, and the function in ``rl/`` that
computes it. ``learner/objective.py`` puts the pieces of a recipe together.
"""
