"""A training run: its loop, checkpoints and logs."""
