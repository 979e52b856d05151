"""Take one training step: objective, optimizer, schedule, devices."""
