"""Full-precision training of large language models on one device, with tiered state."""
