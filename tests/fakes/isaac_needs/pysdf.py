"""Only importable."""
