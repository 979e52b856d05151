"""Run an exported file, compare it with its model, and report."""
