"""What a training needs: batches, losses, optimizers, schedules, checkpoints, and the
loop.
"""
