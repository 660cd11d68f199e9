"""CPU kernels in C++: linears of few and many rows from one weight layout, layers, attention over pages.

The source is in ``source/``. It is compiled on the machine that runs it, once, by the compiler found there
(:mod:`compiler`), and called through :mod:`library` with plain pointers. The files use AVX-512 where the CPU
has bfloat16 products and portable loops elsewhere; rules of rounding are the same everywhere.
"""
