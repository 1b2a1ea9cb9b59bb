"""A second, smaller model drafts for the target."""
