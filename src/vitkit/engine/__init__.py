"""A trained model goes in, the same answers come out sooner: in fp32, bf16 or int8, on whatever this machine has."""
