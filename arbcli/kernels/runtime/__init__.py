"""What every kernel stands on: the language, backends, launches, what is to be verified."""
