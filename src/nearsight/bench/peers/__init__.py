"""What others use in place of our ops, written as its users would write it."""
