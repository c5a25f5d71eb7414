"""Data-parallel training in several processes with `torch.distributed`."""
