"""What somebody does in the first hour, and the sentences that come back."""
