"""One file of data for each family of models: weights by name, activations, RoPE. No code of layers."""
