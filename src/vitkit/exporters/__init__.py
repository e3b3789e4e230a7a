"""Export of models to other runtimes and libraries, with verification."""
