"""Dataset layouts: one module per layout, and a registry."""
