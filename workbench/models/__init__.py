"""Models: configurations, checkpoint sources, tokenizers, weight sets and the decoder."""
