"""The engine: one ragged batch per step over paged KV, with a few typed seams for techniques."""
