"""The schema of a recipe, as pydantic models; ``config`` reads, checks and writes recipes."""
