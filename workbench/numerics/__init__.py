"""Number formats and packing: pure functions on tensors, shared by all technique families."""
