"""Recipes: complete runs, each headed by its command, its time and its expected result; `table` has them all."""
