"""Many requests in one batch: the engine, its scheduler, and the calls of the model."""
