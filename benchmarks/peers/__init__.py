"""Other projects' programs that the benchmarks compare with, each in its own environment."""
