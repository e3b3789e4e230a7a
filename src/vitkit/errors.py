"""Exceptions that vitkit raises, and the warning it issues."""

from vitkit.core.errors import (
    ArgumentError,
    ConfigError,
    DataError,
    InputError,
    MissingDependencyError,
    TrainingError,
    UnknownNameError,
    VitkitError,
    VitkitWarning,
    WeightsError,
)
from vitkit.core.signals import Interrupted

__all__ = [
    "ArgumentError",
    "ConfigError",
    "DataError",
    "InputError",
    "Interrupted",
    "MissingDependencyError",
    "TrainingError",
    "UnknownNameError",
    "VitkitError",
    "VitkitWarning",
    "WeightsError",
]
