"""Sol-RL: explore with FP4, train with BF16. The method as a library; see docs/architecture.md."""

__version__ = "0.1.0"
