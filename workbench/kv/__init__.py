"""KV formats: how the rows of K and V become bytes in a page, and back."""
