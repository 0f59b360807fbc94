"""The parts of a model: masks, layers, positions, attention, caches."""
