"""Backends for NVIDIA's Triton Inference Server: thin classes that the model.py files of
examples/triton name. They run in the server's Python stub, and need nothing of the HTTP server
(docs/triton.md)."""
