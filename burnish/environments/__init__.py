"""Environments of multi-turn episodes, and the processes in which they run.

The worker processes import this package, so it imports neither torch, numpy nor pydantic.
"""
