"""The measurement suite: all sides on the same prompts in turns, and what the machine can do, as rows of JSON."""
