"""Weights on disk: vitkit's own artifact, and how weights are fitted to a changed model."""
