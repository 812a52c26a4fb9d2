"""Quantisation: weights, and for some schemes activations, as 8-bit or 4-bit numbers.

Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference. Jacob et al., 2017,
arXiv 1712.05877. torchao has the kernels, the conversion and the formats. Fake quantisation in training is here, with
torchao's arithmetic, because torchao's replaces modules: it would lose slices of tensor parallelism, and keep a second
copy of each weight until backward.
"""
