"""Random histories against a plain model of what jobs may do."""
