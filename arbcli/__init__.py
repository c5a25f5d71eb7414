"""Train byte-level language models whose whole persistent state is packed trits and int8."""

__version__ = "0.1.0"
