"""What is chosen: models, presets, runs. No torch here."""
