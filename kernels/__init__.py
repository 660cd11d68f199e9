"""Kernels of the workbench, imported as `workbench.kernels`.

A kernel is one file per idea: a plain reference, a torch form and, where it pays, a Triton form of the same
name. Kernels know tensors and number formats only; nothing above `workbench.numerics` is imported here.
The folder lies at the top of the tree and is reached through a link, because `kernels` is also the name of a
package on PyPI and must not be shadowed.
"""
