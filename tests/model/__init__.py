"""Random histories, compared with a plain model of the allowed states of jobs."""
