"""Learning where to leave a model and how far to draft: rounds are logged, a policy is fitted and judged.

:mod:`probe` drafts behind every exit at every place of a text, :mod:`collect` runs it in an engine,
:mod:`fit` learns from what was logged and judges it on prompts that were held out, :mod:`run` does all of it
and writes the file that the technique ``lede`` finds.
"""
