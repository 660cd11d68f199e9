"""Matrix products with quantized weights or activations, and the transform that prepares for them."""
