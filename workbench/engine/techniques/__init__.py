"""Techniques that are settings of the engine itself: paging, prefix cache, chunked prefill."""
