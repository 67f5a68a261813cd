"""Whether an answer is the gold answer. ``compare`` is the door, and ``checker`` grades responses
by it; nothing else knows the inside.

Text, exact numbers and parts are compared in the calling process, at a bounded cost; algebra is
compared by workers with deadlines, which start when they are first needed. No torch.
"""

from burnish.graders.answers.checker import MathGrader, compare, gold_texts
from burnish.graders.answers.comparison import Verdict, readable

__all__ = ["MathGrader", "Verdict", "compare", "gold_texts", "readable"]
