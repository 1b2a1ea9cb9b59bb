"""Building, testing and measuring on a CUDA GPU: docs/gpu.md. Run: benchmarks/gpu/run.sh"""
