"""How tensors lie in memory for the kernels: page formats of the KV cache, packed weights, draft trees.

One file per format, each with its writer and reader in plain torch: they are the kernels' oracle, and what a
program without triton uses. Plain torch only; kernels read the same strides through `PageLayout` and the
dataclasses of the weight formats.
"""
