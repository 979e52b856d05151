"""The report: what a model sees, as one HTML file."""
