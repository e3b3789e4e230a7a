"""Near-duplicates and label errors in image datasets."""
