"""The training run: its parts, its loop, its checkpoints and logs."""
