"""The user's hooks on parameters see this rank's gradients, each once, and nothing else."""
