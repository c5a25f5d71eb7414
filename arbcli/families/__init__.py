"""Families of models, one folder each, imported when a configuration names one."""
