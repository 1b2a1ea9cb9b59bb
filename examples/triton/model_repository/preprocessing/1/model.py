"""Text to token ids."""

from specdec_ext.serve.triton.text import PreprocessingBackend as TritonPythonModel

__all__ = ["TritonPythonModel"]
