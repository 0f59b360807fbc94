"""The parts of a model: masks, norms, layers, positions, attention and its caches."""
