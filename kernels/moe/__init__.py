"""Mixture-of-experts kernels: tokens sorted by expert into padded blocks, and the products over them."""
