"""Plain data everything else is made of: errors, technique specs, recipes, events, runs.

Nothing here imports torch, so that a recipe can be parsed, hashed, compared and shown
on a machine that could never run it.
"""
