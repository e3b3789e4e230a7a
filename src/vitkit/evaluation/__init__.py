"""A trained model and images go in; how good it is comes out, as numbers and as a page to show."""
