"""From a posterior over weights to predictions."""
