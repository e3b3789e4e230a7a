"""Images on their way to the model: decode, sources, transforms, augment, loader; fractals where there are none."""
