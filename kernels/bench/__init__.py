"""Proving and measuring the kernels on a GPU: cases, watched children, ceilings, timing, report.

``workbench gpu-check`` is its command. What a kernel is proven and measured on stands in one file per
kernel, ``cases/<name>.py``; everything else here is about all kernels alike. The parent process never touches
the GPU: children do, one after another, and a child that hangs or loses its device is replaced.
"""
