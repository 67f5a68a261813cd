"""The pieces of an objective: advantage × ratio × loss × reduction × KL × importance.

A piece is one section: its name, settings, formula and paper, and a method that calls its function
in ``rl/``. ``learner/program.py`` combines the pieces of a recipe.
"""
