"""Model files: which ones, where they are, and whether they are the right bytes."""
