"""Engines of other people, each in a virtual environment of its own: make engines."""
