"""The rule of votes."""
