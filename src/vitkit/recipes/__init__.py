"""Recipes: complete runs, each with its command, time and expected result."""
