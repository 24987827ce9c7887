"""What the adaptation does to single images: figures of one image, and studies over many."""
