"""Kernels of the last mile: from logits to a law, from a law to a token, from drafts to a verdict."""
