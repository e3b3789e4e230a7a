"""Every model of the paper by name: its configuration, exact size, cost and aliases."""
