"""Batches, losses, optimizers, schedules, checkpoints and the loop."""
