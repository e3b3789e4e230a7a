"""Training objectives: (model, images, targets) -> loss and metrics."""
