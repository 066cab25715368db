"""Who takes part in a window: engines, parameters, ranks; and how gradients are held back."""
