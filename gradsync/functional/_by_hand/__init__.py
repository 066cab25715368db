"""`no_sync` and `sync_gradients`, for loops by hand: the decorator and the iterator do not use them."""
