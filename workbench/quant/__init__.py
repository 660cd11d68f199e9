"""Weight methods: how a checkpoint's matrices become the weights that a decoder multiplies with."""
