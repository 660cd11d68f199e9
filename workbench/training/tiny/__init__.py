"""The tiny model that ships with the repository: how it is built, from text to folder.

``python -m workbench.training.tiny --minutes 25`` fetches the texts, trains a tokenizer
and a 3.5-million-parameter Llama, and writes a Hugging Face folder.
"""
