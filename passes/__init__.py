"""The planning half of autopar: a compiler from graphs to plans that never starts JAX."""
