"""Accuracy against sparsity for the posterior's score, magnitude and chance."""
