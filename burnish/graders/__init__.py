"""Grading of responses: rewards, length penalties, judges, and the workers that run rewards.

Grader workers import this package, so this file imports neither torch nor numpy.
"""
