"""Using a trained model: text from it, and its loss on a text."""
