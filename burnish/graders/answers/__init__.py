"""Comparison of an answer with a gold answer. The interface is ``compare`` and, for responses,
``MathGrader``; no other module depends on the internals.

Text, exact numbers and parts are compared in the calling process at a bounded cost. Algebra is
compared by workers with timeouts, which start when they are first needed. This package does not
import torch.
"""

from burnish.graders.answers.checker import MathGrader, compare, gold_texts
from burnish.graders.answers.comparison import Verdict, readable

__all__ = ["MathGrader", "Verdict", "compare", "gold_texts", "readable"]
