"""Data that ends, on each rank at a time of its own."""
