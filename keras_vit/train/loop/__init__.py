"""Run a whole training: parts, loop, checkpoints and logs."""
