"""Dynamic chunking of a sequence: boundaries, gathering, smoothing and upsampling of chunks."""
