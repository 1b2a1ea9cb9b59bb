"""Configurations of the engine and its methods; the standard library is enough to check them."""
