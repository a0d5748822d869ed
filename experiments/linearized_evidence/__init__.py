"""The linearized evidence on modern networks: at the mode or not, with shared or separate precisions."""
