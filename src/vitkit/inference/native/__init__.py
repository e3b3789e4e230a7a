"""C++ kernels for Vision Transformers, compiled for this CPU, and their engine."""
