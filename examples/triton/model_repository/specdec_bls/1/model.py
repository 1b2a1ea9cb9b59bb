"""Draft and target of this server, orchestrated for requests of text."""

from specdec_ext.serve.triton.bls import BlsBackend as TritonPythonModel

__all__ = ["TritonPythonModel"]
