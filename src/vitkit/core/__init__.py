"""Foundations of every other layer: errors, configuration, shapes, atomic files, signals and logs."""
