"""A path goes in, the tensors of the file come out one at a time; and back into a file; read `readers`."""
