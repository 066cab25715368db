"""How ranks speak with each other: in words through the store (`meet`), in numbers once a window (`line`)."""
