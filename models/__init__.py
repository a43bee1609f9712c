"""Model zoo in flax.linen: ordinary JAX code that knows nothing of autopar."""
