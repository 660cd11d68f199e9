"""A small model trained to be left early, from scratch: layer dropout, and a loss behind every layer.

Elhoushi et al., "LayerSkip" (arXiv 2404.16710, section 4). What it is for: the drafter ``layerskip`` reads
early layers through the model's own norm and head, which only such a training makes worth reading.
"""
