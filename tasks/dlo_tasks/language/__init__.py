"""Task and data for causal language models of Hugging Face transformers."""
