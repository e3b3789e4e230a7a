"""A trained model goes in, a program for another runtime comes out, with the proof that it gives the same answers."""
