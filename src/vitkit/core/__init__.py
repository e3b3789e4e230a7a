"""What every other layer stands on: errors, configuration, the axis legend and the run log."""
