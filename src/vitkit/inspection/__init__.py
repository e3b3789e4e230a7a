"""Inspection of models: attention maps, attention distance, learned features and layer analysis."""
