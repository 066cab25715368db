"""`sync_every`: a loop that keeps its own backward and update."""
