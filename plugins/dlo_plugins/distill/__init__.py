"""Mathematics of distillation: distances between logits, hidden states and attention maps, and initial weights."""
