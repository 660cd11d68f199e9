"""What selectors are made of: when they act, how many tokens they keep, and scores of cached tokens."""
