"""Benchmarks of specdec_ext. One file answers one question; benchmarks/README.md lists them."""
