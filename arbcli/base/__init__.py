"""Errors, printing, reading of untrusted files, environment and caches."""
