"""Inference engines, predictions for images and files of predictions, and the benchmark of engines."""
