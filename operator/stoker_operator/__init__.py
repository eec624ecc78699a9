"""Stoker's operator: turns InferenceService objects into running, verified model servers. Never imports
torch."""
