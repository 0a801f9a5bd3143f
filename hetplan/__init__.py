"""hetplan plans parallel training of large models on clusters whose parts differ."""

__version__ = "0.1.0"
