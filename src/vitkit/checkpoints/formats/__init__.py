"""One table a format: names and shapes in a file go in, the model they hold and the rules of its tensors come out."""
