"""Cases by kernel: ``cases/<kernel>.py`` holds ``CASES`` and, where two of them are compared, ``RELATIONS``.

Checks go from the smallest shape, which the interpreter can run, to shapes that fill the chip; timed cases
are those of the literature or of a common model, with the marks they are held against.
"""
