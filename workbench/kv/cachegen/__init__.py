"""CacheGen: the KV cache as a stream of entropy-coded chunks at several loss levels (arXiv 2310.07240).

A context's cache is cut into chunks that are coded independently, each at every level; whoever needs the
context fetches chunk after chunk at the level that the network allows, or its text, and computes it. It is a
transfer codec: attention never reads it.

Read in this order: :mod:`levels` (bins per third of the layers), :mod:`quantize` (scale, symbols, anchors
and deltas), :mod:`tables` and :mod:`artefact` (calibrated probabilities), :mod:`ranges` (symbols to bytes),
:mod:`layout`, :mod:`header`, :mod:`codec` and :mod:`stored` (a chunk in, layers out), :mod:`context` (all
chunks, all levels). :mod:`link`, :mod:`policy` and :mod:`transfer` simulate the streaming.
"""

from workbench.kv.cachegen.technique import SPEC as SPEC
from workbench.kv.cachegen.technique import Config as Config
from workbench.kv.cachegen.technique import bind as bind
