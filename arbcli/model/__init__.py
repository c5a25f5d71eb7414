"""The model: packed tensors, layers, parts, stages and the language model built from them."""
