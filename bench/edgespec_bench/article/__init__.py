"""The configurations of the tutorial that this project starts from, measured here; and a 1 B model's best draft."""
