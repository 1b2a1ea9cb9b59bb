"""The draft model: an engine like the target's."""

from specdec_ext.serve.triton.decoder import DecoderBackend as TritonPythonModel

__all__ = ["TritonPythonModel"]
