"""Configurations of the parts of the core, one file each, without torch."""
