"""One training step: objective, optimizer, distribution."""
