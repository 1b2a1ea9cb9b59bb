"""Lookahead decoding by its authors (lade 0.0.2), run as a subprocess in .venv-lade."""
