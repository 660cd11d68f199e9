"""Attention kernels: prefill, paged decode, draft trees, and what writes and merges their data."""
