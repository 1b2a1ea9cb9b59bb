"""llama.cpp's HTTP server, built from PyPI's source package, run as a subprocess."""
