"""Drafters against plain decoding, on prompts that a person might ask: measured, predicted, kept.

``settings`` says what is compared, ``prompt_sets`` on what; ``turns`` measures one group of prompts and
``bench`` all of them; ``costs`` and ``forecast`` predict what was measured from other prompts, and
``results`` sums up.
"""
