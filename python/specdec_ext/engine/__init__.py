"""The loop between requests and the executor, and what it is built from."""
