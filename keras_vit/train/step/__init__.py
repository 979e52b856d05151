"""The training step: objective, optimizer, schedule, devices."""
