"""Speed, as ratios: each pair is measured alternately in one run. `make bench` prints tables."""
