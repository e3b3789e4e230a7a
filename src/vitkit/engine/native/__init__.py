"""A plain Vision Transformer goes in; the same model on kernels compiled for this machine's CPU comes out."""
