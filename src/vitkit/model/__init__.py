"""Models of the paper as pure single-device modules. Start with `vit`, which follows equations 1 to 4."""
