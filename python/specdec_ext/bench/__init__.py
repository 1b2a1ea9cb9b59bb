"""Measuring speed: latency, throughput, sweeps, and the search for a configuration."""
