"""Public functions, one module per group of commands."""
