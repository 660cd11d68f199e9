"""Permissive English and Python text: where it comes from and how it is split.

Four sources, all free to redistribute: the Python documentation and standard library
(PSF-2.0), the plays of Shakespeare and three books of Milton (public domain), and the
Jargon File (public domain). Every document is wholly training text or wholly held out.
"""

from workbench.training.corpus.sources import (
    Document,
    Source,
    fetch,
    read_documents,
    read_library_source,
    read_sources,
    read_standard_library,
)

__all__ = [
    "Document",
    "Source",
    "fetch",
    "read_documents",
    "read_library_source",
    "read_sources",
    "read_standard_library",
]
