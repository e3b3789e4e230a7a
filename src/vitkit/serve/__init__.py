"""Trained models go in, a network service with a page of its own comes out."""
