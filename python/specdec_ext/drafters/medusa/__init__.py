"""Medusa: heads on the target guess the next tokens."""
