"""Studies: the paper's experiments as grids of runs with claims and statistics."""
