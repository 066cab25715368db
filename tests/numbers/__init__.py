"""Counts, scalers and what `progress` tells: numbers that are exact, or an error on every rank."""
