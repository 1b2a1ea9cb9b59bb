"""Token ids to text."""

from specdec_ext.serve.triton.text import PostprocessingBackend as TritonPythonModel

__all__ = ["TritonPythonModel"]
