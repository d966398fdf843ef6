"""Triton kernels of the ops, and the one place where they are chosen: for tensors on CUDA devices.

Each op's Python function in `dtensor_sample.ops` is the readable twin of its kernel, bit for bit:
the CPU path, the oracle of the tests, and what runs on a GPU without Triton.
"""
