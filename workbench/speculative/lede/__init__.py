"""LEDE: where to leave the model and how far to draft, learnt offline from rounds that were played.

"Experience-Driven Dynamic Exits for LLMs with Reinforcement Learning" (arXiv 2606.03113). A round of
self-speculation is a decision process: behind each layer of its first draft leave or go on, then behind each
draft stop or draft another. A Q-network learns both from a buffer of logged rounds. The source's
reward formula is not known here: it is accepted tokens minus cost in passes of the whole model.

Read in this order: :mod:`state`, :mod:`rounds` (the decision process), :mod:`walks` (rounds over a logged
text), :mod:`replay`, :mod:`q_learning`, :mod:`choice` (when what is fixed is better), :mod:`learnt` (the
file), :mod:`control` (in the engine).
"""

from workbench.speculative.lede.technique import SPEC as SPEC
from workbench.speculative.lede.technique import Config as Config
from workbench.speculative.lede.technique import bind as bind
