"""A round of speculation as one program of fixed shapes."""
