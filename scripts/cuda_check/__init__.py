"""Checks of the CUDA sources that need a compiler and no GPU. Run: scripts/cuda_check.sh"""
