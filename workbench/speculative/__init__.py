"""Speculative decoding: drafters, verification rules and acceptance statistics."""
