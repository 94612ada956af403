"""Every family as tests take it: tiny checkpoints, what their logits and caches are, and what they have."""
