"""Training: the shipped tiny model, and the texts it is made of."""
