"""A run: a configuration and images go in, a run folder with a trained model and its report comes out; read `run`."""
