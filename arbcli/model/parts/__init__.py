"""Parts of models: mixers, channel mixers, heads and memories."""
