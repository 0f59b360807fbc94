"""Many requests in one batch: the engine and the calls that it makes."""
