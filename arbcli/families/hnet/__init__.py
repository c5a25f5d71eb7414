"""H-Net: stages of learned chunks."""
