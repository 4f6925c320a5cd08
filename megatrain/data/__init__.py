"""Training samples: reading, order and batches."""
