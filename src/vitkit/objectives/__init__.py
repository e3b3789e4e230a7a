"""What a run learns from, and how well it did: a model and a batch go in, a loss and numbers come out."""
