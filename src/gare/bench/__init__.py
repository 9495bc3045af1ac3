"""Speed, always as a ratio to a reference in the same run."""
