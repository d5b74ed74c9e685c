"""LingBot worlds: a causal video transformer that makes a world chunk by chunk, and all that one session needs."""
