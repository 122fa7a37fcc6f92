"""The parts of scripts/report.py: reading run folders, figures of them, and the page."""
