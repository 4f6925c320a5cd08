"""A Hugging Face causal LM, cut into units whose parameters are bound from buffers."""
