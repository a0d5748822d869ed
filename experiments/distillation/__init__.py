"""What ensembles and distilled students keep of a posterior."""
