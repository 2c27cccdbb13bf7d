"""Block-scaled FP8: the one quantiser, and products of matrices that it has quantised."""
