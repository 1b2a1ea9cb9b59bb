"""The target: an engine that verifies drafts, or decodes with its own."""

from specdec_ext.serve.triton.decoder import DecoderBackend as TritonPythonModel

__all__ = ["TritonPythonModel"]
