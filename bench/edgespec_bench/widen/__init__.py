"""Synthetic larger targets: a model widened without changing what it computes, then noise so that drafts err."""
