"""Runs on the Hugging Face Hub: what is pushed, and how it is read back."""
