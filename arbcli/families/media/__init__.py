"""Sounds and pictures as bytes that a model of bytes can read and write."""
