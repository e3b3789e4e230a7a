"""Weights on disk: vitkit's own artefact, and how weights are fitted to a changed model."""
