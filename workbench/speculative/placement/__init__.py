"""Draft and target at two places: messages, trees that outlive a round, and ways to run the two sides."""
