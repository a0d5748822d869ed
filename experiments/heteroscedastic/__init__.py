"""Evidence against width and depth, with test likelihood beside it."""
