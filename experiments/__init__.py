"""One folder per experiment, each with its numbers and its figure: `make experiment NAME=...`."""
