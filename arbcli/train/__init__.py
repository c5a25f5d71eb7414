"""Training: the step, the run, what a run leaves on disk."""
