"""Draft heads and how they are trained: a model's own text, its hidden states on it, a head that reads them.

Data and features are shards on disk, training has checkpoints: everything may be stopped at any moment and
goes on from there. A head is valid for the weights it was trained on and no others.
"""
