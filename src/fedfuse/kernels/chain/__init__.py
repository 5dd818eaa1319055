"""Training compiled: a network as a chain of layers, and the loops that go through it and back."""
