"""The CPU peers of `benchmarks.peers_cpu`: their environments, and one worker for each of them."""
