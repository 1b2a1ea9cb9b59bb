"""Trainers of drafters: data from the target itself, Medusa heads, ReDrafter, a small drafter."""
