"""The model: its configuration, its packed tensors, their update rules and its layers."""
