"""The loss, and the choice of the next byte."""
