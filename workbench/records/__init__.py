"""Runs kept, compared and exported: one SQLite file, comparisons in words, self-contained reports."""
