"""A place goes in, a DataSet comes out: one module for each family of layouts, and `detect`, which tells them apart."""
