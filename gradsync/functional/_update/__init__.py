"""The update of a closed window, and arithmetic on gradients."""
