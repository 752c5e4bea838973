"""Speed as ratios to a peer or a bound in the same run: ``make bench``."""
