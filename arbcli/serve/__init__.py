"""A server of the OpenAI protocol for saved models."""
