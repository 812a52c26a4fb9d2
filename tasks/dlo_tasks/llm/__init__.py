"""Causal language models of Hugging Face, and text to train them on."""
