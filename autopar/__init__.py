"""An ordinary JAX train step, planned for many devices and run."""
