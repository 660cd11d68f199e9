"""A small model with multi-token prediction of its own, from scratch: text, training, measuring, card.

``python -m workbench.training.mtp`` trains a Llama on the standard library together with a module that
predicts one token further, then teaches the module to be fed with its own output, and writes a folder.
"""
