"""A run shared out to several processes, each with a GPU of its own: `torch.distributed`."""
