"""hetplan."""
