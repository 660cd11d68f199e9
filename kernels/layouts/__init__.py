"""How weights, caches and trees lie in memory for the kernels: packers and unpackers in plain torch."""
