"""The mathematics the methods stand on; it knows tensors and nothing of clients, rounds or models.

- `cg`: conjugate gradients for positive definite operators on tensors of any shape
- `psd`: symmetric positive semi-definite matrices: packing, testing, roots, solves
- `factor`: symmetric matrices that need not be written out: low rank over a diagonal, and blocks
- `kron`: damping and sums of Kronecker products, and the mean of Gaussians whose precisions they are
- `subspace`: the same where factors are a few directions and a scalar, or blocks
- `ridge`: ridge regression and discriminant analysis from sums
- `lowrank`: products of thin matrices
- `assign`: assignments and entropic transport
- `atoms`: units of several clients as copies of common ones, by a Beta–Bernoulli process
- `divergence`: how far from Gaussian, and how far apart
- `lanczos`: the spectrum of an operator known only by its products
- `privacy`: how private Gaussian noise is, and what several releases cost together
"""
