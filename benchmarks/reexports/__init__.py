"""The pieces of `make bench-spark`, a file for each subject."""
