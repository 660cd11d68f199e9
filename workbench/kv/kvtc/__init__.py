"""KVTC: the KV cache as transform-coded bytes at rest (arXiv 2511.01815, ICLR 2026).

Rows of all layers and heads are decorrelated by one linear basis per model, a dynamic program spreads a bit
budget over its components, and what remains is entropy coded. It is a storage codec: attention never reads
it.

Read in this order: :mod:`joint` (rows of all layers, keys without their rotation), :mod:`basis` (mean and
principal components), :mod:`formats` (drop, int2, int4, fp8), :mod:`distortion` and :mod:`plan` (who gets how
many bits), :mod:`codes`, :mod:`deflate` and :mod:`ranges` (symbols to bytes), :mod:`encoder` and
:mod:`stored` (a sequence in, layers out), :mod:`codec`.
"""

from workbench.kv.kvtc.technique import SPEC as SPEC
from workbench.kv.kvtc.technique import Config as Config
from workbench.kv.kvtc.technique import bind as bind
