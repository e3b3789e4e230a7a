"""Reading and writing of tensor files; `readers.open_tensors` is the entry point."""
