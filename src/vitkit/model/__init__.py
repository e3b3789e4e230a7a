"""The models of the paper as pure single-device modules; read `vit` first, it follows equations 1 to 4."""
