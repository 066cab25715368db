"""Ranks and how they meet."""
