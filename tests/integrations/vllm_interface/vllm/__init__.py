"""A stand-in for the parts of vLLM 0.32 that an attention backend meets, for machines without vLLM."""
