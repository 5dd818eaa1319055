"""The mathematics the methods stand on; it knows tensors and nothing of clients, rounds or models.

- `cg`: conjugate gradients for positive definite operators on tensors of any shape
- `psd`: symmetric positive semi-definite matrices: packing, testing, roots, solves
- `kron`: sums of Kronecker products, and the mean of Gaussians whose precisions they are
- `subspace`: the same where factors are a few directions and a scalar
- `damping`: damping of Kronecker products, and how large their factors are
- `assign`: assignments and entropic transport
- `atoms`: units of several clients as copies of common ones, by a Beta–Bernoulli process
- `divergence`: how far from Gaussian, and how far apart
- `lanczos`: the spectrum of an operator known only by its products
"""
