"""Modules that others import by name."""
