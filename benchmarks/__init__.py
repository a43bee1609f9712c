"""Scripts over autopar's public API; run each from the checkout as `python -m benchmarks.<name>`."""
