"""Training: the step, the run, and the files of a run."""
