"""Training: configuration, loop, checkpoints, distributed runs, sweeps and suites; read `run` first."""
