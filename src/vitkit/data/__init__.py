"""Datasets and their way to the model: layouts, decoding, preprocessing, augmentation and loaders."""
