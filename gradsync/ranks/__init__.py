"""Communication between ranks: words through the store (`meet`), numbers in a table once a window (`tables`)."""
