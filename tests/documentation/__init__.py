"""What the documentation shows is run, or says why it cannot be."""
